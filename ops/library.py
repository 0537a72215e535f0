"""Building the operator library with the C++ compiler at hand, and loading it into torch.

A library is built once for a set of sources, flags, torch release, compiler and processor, and kept in the
user's cache. Knows nothing of engines or models.
"""

import contextlib
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

from bitsmith.core.cache import cache_dir
from bitsmith.core.digest import canonical_json, sha256_bytes, sha256_file
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.ops.fake import register_fakes
from bitsmith.ops.isa import enabled_isa, missing_isa

SOURCES_DIR = Path(__file__).parent / "csrc"
LIBRARY_NAME = "operators.so"
INFO_NAME = "operators.json"
# Counts up when operators are added or their arguments change: an engine carries its own library.
OPERATORS_INTERFACE = 4

# Contraction is off so that both forms of a kernel round alike: where a fused multiply-add is wanted, the
# sources say so.
COMPILE_FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fvisibility=hidden",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip

# Added to the others: a build that stops at the first access outside an object, or at undefined behaviour.
# -O1: optimised as far as that leaves a line to blame. vptr: would need type information of torch's classes.
SANITIZER_FLAGS = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr",
    "-fno-omit-frame-pointer", "-g", "-O1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OperatorsInfo:
    """What a built library needs and how it was made. isa: processor flags its code may use."""

    isa: tuple[str, ...]
    flags: tuple[str, ...]
    compiler: str
    torch: str


@dataclass(slots=True)
class _Loaded:
    digest: str | None = None


_loaded = _Loaded()


def find_compiler() -> str:
    """Path of the C++ compiler. Raises Refused saying how to install one."""
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return path
    raise Refused(
        "No C++ compiler found (c++, g++ or clang++). "
        "Install one, for example: apt-get install g++, or dnf install gcc-c++."
    )


def build_operators(reporter: Reporter, flags: tuple[str, ...] = COMPILE_FLAGS) -> Path:
    """Path of the operator library for this machine, built with these flags if the cache has none."""
    compiler = find_compiler()
    isa = enabled_isa(compiler, flags)
    info = OperatorsInfo(isa, flags, _compiler_version(compiler), torch.__version__)
    directory = cache_dir() / "operators" / _build_key(info)[:16]
    library = directory / LIBRARY_NAME
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock"):
        if not library.is_file():
            reporter.say("Building the operator library (once for this machine and release) ...")
            _build(compiler, info, library)
    return library


def operators_info(library: Path) -> OperatorsInfo:
    """What was recorded beside a library when it was built."""
    body = json.loads(library.with_name(INFO_NAME).read_bytes())
    return OperatorsInfo(tuple(body["isa"]), tuple(body["flags"]), body["compiler"], body["torch"])


def load_operators(library: Path) -> None:
    """Load a library and register its operators with torch; loading the same one again does nothing.

    Raises Refused for a second, different library: torch cannot unload the first.
    """
    digest = sha256_file(library)
    if _loaded.digest == digest:
        return
    if _loaded.digest is not None:
        raise Refused(
            f"{library} differs from the operator library that this process has loaded; use a new process."
        )
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise Refused(f"{library} cannot be loaded: {error}. Compile the engine again here.") from error
    register_fakes()
    _loaded.digest = digest


def loaded_digest() -> str:
    """SHA-256 of the library that this process has loaded."""
    assert _loaded.digest is not None, "load_operators comes first"
    return _loaded.digest


def check_isa(isa: Sequence[str]) -> None:
    """Refuse a library or engine whose code this processor cannot run."""
    if missing := missing_isa(isa):
        raise Refused(
            f"This processor lacks {', '.join(missing)}, which the engine's code uses. "
            "Compile the engine on this machine: bitsmith compile."
        )


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES_DIR.iterdir() if path.suffix in (".cpp", ".h"))


def _build_key(info: OperatorsInfo) -> str:
    hashes = {path.name: sha256_file(path) for path in _sources()}
    return sha256_bytes(canonical_json([hashes, dataclasses.asdict(info)]))


def _compiler_version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[0] if result.stdout else compiler


def _include_flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _build(compiler: str, info: OperatorsInfo, library: Path) -> None:
    """Compile every source at once, link, rename into place: the record first, the library last."""
    partial = library.parent / "build.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    flags = [*info.flags, *_include_flags()]
    sources = [path for path in _sources() if path.suffix == ".cpp"]
    objects = [partial / f"{path.stem}.o" for path in sources]
    try:
        pairs = zip(sources, objects, strict=True)
        _run_all([[compiler, *flags, "-c", str(source), "-o", str(to)] for source, to in pairs])
        libraries = Path(torch.__file__).parent / "lib"
        linked = partial / LIBRARY_NAME
        # torch's own OpenMP runtime has the soname libgomp.so.1, so -fopenmp adds no second one at run time.
        link = [compiler, "-shared", *info.flags, *map(str, objects), f"-L{libraries}"]
        _run_all([[*link, "-lc10", "-ltorch_cpu", "-o", str(linked)]])
        record = partial / INFO_NAME
        record.write_text(json.dumps(dataclasses.asdict(info), indent=2) + "\n", encoding="utf-8")
        record.replace(library.with_name(INFO_NAME))
        linked.replace(library)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)


def _run_all(commands: list[list[str]]) -> None:
    """Run compiler commands side by side. Raises WorkFailed with what the first failing one said."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode != 0:
            raise WorkFailed(f"Building the operator library failed:\n{output[-4000:]}")
