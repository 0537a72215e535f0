"""Building, recording, loading."""

import shutil
from pathlib import Path

import pytest
import torch

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.ops import isa
from bitsmith.ops import library as library_module
from bitsmith.ops.library import build_operators, check_isa, load_operators, operators_info

REPORTER = Reporter(quiet=True)


def test_a_built_library_is_found_again(library: Path, flags: tuple[str, ...]) -> None:
    before = library.stat().st_mtime_ns
    assert build_operators(REPORTER, flags) == library
    assert library.stat().st_mtime_ns == before
    assert not (library.parent / "build.partial").exists()


def test_what_the_library_needs_is_recorded(library: Path) -> None:
    info = operators_info(library)
    assert info.torch == torch.__version__
    assert "-march=native" in info.flags
    assert ("avx2" in info.isa) == ("avx2" in isa.cpu_flags())
    check_isa(info.isa)  # built here, runs here
    with pytest.raises(Refused, match="lacks avx9000"):
        check_isa((*info.isa, "avx9000"))


def test_loading_twice_does_nothing_and_another_is_refused(library: Path, tmp_path: Path) -> None:
    load_operators(library)
    copy = tmp_path / "operators.so"
    shutil.copy(library, copy)
    load_operators(copy)  # the same bytes
    copy.write_bytes(library.read_bytes() + b"\0")
    with pytest.raises(Refused, match="differs from the operator library that this process has loaded"):
        load_operators(copy)


def test_no_compiler_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="apt-get install g"):
        build_operators(REPORTER)


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int f() { return undeclared; }\n")
    monkeypatch.setattr(library_module, "SOURCES_DIR", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(WorkFailed, match="undeclared"):
        build_operators(REPORTER)
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left <= {".lock"}
