"""Unified checkpoints that are taken over as they are: NVFP4 and FP8 block scales."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from bitsmith.compile.tensorrt_kv_plan import KvCacheChoice
from bitsmith.compile.tensorrt_modelopt_source import READABLE_ALGOS
from bitsmith.compile.tensorrt_release import Release
from bitsmith.compile.tensorrt_unified_check import check_unified_checkpoint
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Fallback
from bitsmith.quantize.modelopt_config import QUANT_CONFIG_NAME, modelopt_section


@dataclass(frozen=True, slots=True)
class UnifiedCopy:
    """A checkpoint that the validator accepted; its files are copied byte for byte."""

    quant_algo: str
    kv_algo: str | None
    fallbacks: tuple[Fallback, ...] = ()


def plan_copy(path: Path, release: Release, kv_cache: KvCacheChoice) -> UnifiedCopy | None:
    """None for a checkpoint that an export writes anew. Raises Refused when the validator refuses it."""
    section = modelopt_section(CheckpointReader(path))
    if section is None or section.get("quant_algo") in READABLE_ALGOS:
        return None
    report = check_unified_checkpoint(path, release)
    if not report.is_accepted:
        raise Refused(
            f"{path} is not for this backend. {report.refusals[0].where}: {report.refusals[0].text}"
        )
    if kv_cache != "auto":
        raise Refused(
            f"{path} is taken over as it is, with {section.get('kv_cache_quant_algo') or 'no'} KV-cache "
            "quantization; --kv-cache must be auto."
        )
    return UnifiedCopy(str(section["quant_algo"]), section.get("kv_cache_quant_algo"))


def copy_checkpoint(path: Path, target: Path) -> None:
    """Weights, their index and both configurations; other files are copied with the tokenizer."""
    names = [file.name for file in path.glob("*.safetensors")]
    names += [file.name for file in path.glob("*.safetensors.index.json")]
    for name in (*names, "config.json", QUANT_CONFIG_NAME):
        if (path / name).is_file():
            shutil.copyfile(path / name, target / name)
