"""`inspect --against`: which validator, which release, and where in an artifact the checkpoint is."""

from pathlib import Path

from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_finding import CheckReport
from bitsmith.compile.tensorrt_release import (
    DEFAULT_RELEASE,
    require_engine_release,
    require_pytorch_release,
)
from bitsmith.compile.tensorrt_unified_check import check_unified_checkpoint
from bitsmith.core.errors import Refused

TARGETS = ("tensorrt-llm", "tensorrt-llm-pytorch")


def check_against(path: Path, against: str, source: Path | None = None) -> CheckReport:
    """path: a checkpoint, or an artifact that `compile` wrote. against: TARGET or TARGET=VERSION.

    source: the model that the checkpoint came from, for a comparison of numbers.
    """
    target, separator, version = against.partition("=")
    if target not in TARGETS or (separator and not version):
        raise Refused(f"--against {against!r} is not known; write {' or '.join(TARGETS)}[=VERSION].")
    if not path.is_dir():
        raise Refused(f"{path} is not a directory.")
    version = version or str(DEFAULT_RELEASE)
    if target == "tensorrt-llm":
        release = require_engine_release(version)
        inner = path / "checkpoint"
        return check_engine_checkpoint(inner if inner.is_dir() else path, release, source)
    release = require_pytorch_release(version)
    inner = path / "model"
    return check_unified_checkpoint(inner if inner.is_dir() else path, release, source)
