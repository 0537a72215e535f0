"""Building, recording, loading; one OpenMP runtime."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.ops import isa
from bitsmith.ops import library as library_module
from bitsmith.ops.library import build_operators, check_isa, load_operators, operators_info

REPORTER = Reporter(quiet=True)


def test_a_built_library_is_found_again(library: Path) -> None:
    before = library.stat().st_mtime_ns
    assert build_operators(REPORTER) == library
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


SCRIPT = """
import sys
from pathlib import Path
from bitsmith.ops.library import load_operators
load_operators(Path(sys.argv[1]))
import torch
torch.set_num_threads(2)
x, weight = torch.randn(64, 512), torch.randn(512, 512)
def num_threads():
    return len(list(Path("/proc/self/task").iterdir()))
x @ weight
before = num_threads()
torch.ops.bitsmith.linear_dense(x, weight, None, 0)
after = num_threads()
maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
torch.set_num_threads(1)
alone = torch.ops.bitsmith.linear_dense(x, weight, None, 0)
torch.set_num_threads(2)
same = torch.equal(alone, torch.ops.bitsmith.linear_dense(x, weight, None, 0))
print(len(maps), after - before, same)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime_and_one_pool(library: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(library)], capture_output=True, text=True, check=True
    )
    num_runtimes, new_threads, same = result.stdout.split()
    assert num_runtimes == "1", result.stdout
    assert new_threads == "0", "the operators run on the threads that torch's own products started"
    assert same == "True"
