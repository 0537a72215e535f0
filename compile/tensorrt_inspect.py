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
from bitsmith.core.manifest import MANIFEST_NAME, read_manifest

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
        if not inner.is_dir():
            _refuse_other_artifacts(path)
        return check_engine_checkpoint(inner if inner.is_dir() else path, release, source)
    release = require_pytorch_release(version)
    inner = path / "model"
    return check_unified_checkpoint(inner if inner.is_dir() else path, release, source)


def _refuse_other_artifacts(path: Path) -> None:
    """One sentence for what is no TensorRT-LLM checkpoint at all, instead of a finding for every field."""
    if not (path / MANIFEST_NAME).is_file():
        return
    kind = read_manifest(path).kind
    if kind == "quantized-checkpoint":
        raise Refused(
            f"{path} is a Hugging Face checkpoint, not a TensorRT-LLM one. Export it first: "
            f"bitsmith compile {path} --target tensorrt-llm --out DIR, then check DIR."
        )
    raise Refused(f"{path} is an artifact of kind {kind}; --against checks TensorRT-LLM checkpoints.")
