"""A Python that has nvidia-modelopt: one that the user has, or one of our own in the user's cache.

ModelOpt's requirements and this program's would bind each other, so that it never shares an environment.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from bitsmith.core.artifact import partial_path
from bitsmith.core.cache import cache_dir
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.logged_process import run_logged
from bitsmith.core.progress import Reporter

MODELOPT_VERSION = "0.47.0"
# What it was tried with here. It imports requests without requiring it.
PINS: Mapping[str, str] = {
    "nvidia-modelopt": MODELOPT_VERSION,
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "requests": "2.34.2",
}
_KEYED = ("nvidia-modelopt", "torch", "transformers")  # what a result depends on
_PROBE = """
import importlib.metadata, json, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
print(json.dumps(versions))
"""


@dataclass(frozen=True, slots=True)
class ModelOptEnvironment:
    """python: the interpreter that the user named; None: one of our own, made when it is needed first."""

    python: Path | None = None

    def versions(self) -> dict[str, str]:
        """What is there, or will be, for the stage key. Raises Refused where something is missing."""
        if self.python is None:
            return _keyed({**PINS, "python": platform.python_version()})
        return _keyed(_probe(self.python))

    def ready(self, reporter: Reporter) -> Path:
        """The interpreter; makes our own first where that is not done. Raises WorkFailed where pip fails."""
        if self.python is not None:
            return self.python
        path = _own_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                _make(path, reporter)
        return path / "bin" / "python"


def _own_path() -> Path:
    """Named by what is pinned and by the Python that it is made from."""
    tag = f"py{sys.version_info.major}.{sys.version_info.minor}"
    pins = "-".join(PINS[name] for name in _KEYED)
    return cache_dir() / "environments" / f"modelopt-{pins}-{tag}"


def _make(path: Path, reporter: Reporter) -> None:
    """venv and pip in a `.partial` directory that is renamed when complete; a log beside it."""
    partial, log = partial_path(path), path.with_name(f"{path.name}.log")
    shutil.rmtree(partial, ignore_errors=True)
    log.unlink(missing_ok=True)
    reporter.say(f"Making an environment with nvidia-modelopt {MODELOPT_VERSION} at {path} ...")
    requirements = [f"{name}=={version}" for name, version in PINS.items()]
    install = ("-m", "pip", "install", "--no-input", "--disable-pip-version-check", *requirements)
    try:
        run_logged((sys.executable, "-m", "venv", str(partial)), log, reporter)
        run_logged((str(partial / "bin" / "python"), *install), log, reporter)
    except WorkFailed as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise WorkFailed(
            f"{error}\nThe whole log is {log}. Set up pip's index, or make an environment with "
            f"{', '.join(requirements)} yourself and name its Python by --backend-python."
        ) from error
    partial.rename(path)
    log.unlink()


def _probe(python: Path) -> Mapping[str, str]:
    """Versions by package, `python` among them; no package is imported for it."""
    command = [str(python), "-I", "-c", _PROBE, *PINS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise Refused(f"--backend-python {python} does not run as a Python interpreter ({error}).") from error
    missing = [name for name, version in found.items() if version is None]
    if missing:
        wanted = " ".join(f"{name}=={PINS[name]}" for name in missing)
        raise Refused(
            f"--backend-python {python} lacks {', '.join(missing)}. Install {wanted} there, or leave "
            "--backend-python out for an environment of our own."
        )
    if found["nvidia-modelopt"] != MODELOPT_VERSION:
        raise Refused(
            f"--backend-python {python} has nvidia-modelopt {found['nvidia-modelopt']}; its files are read "
            f"here as {MODELOPT_VERSION} writes them. Install that release there."
        )
    return dict(found)


def _keyed(found: Mapping[str, str]) -> dict[str, str]:
    """Names for a manifest. The local part of a version (+cpu) is left out: pip decides on it later."""
    names = {"modelopt": "nvidia-modelopt"} | {f"modelopt-{n}": n for n in ("python", *_KEYED[1:])}
    return {ours: found[name].partition("+")[0] for ours, name in names.items()}
