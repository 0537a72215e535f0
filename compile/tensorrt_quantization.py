"""The `quantization` section of a TensorRT-LLM configuration, and which modules it reaches.

Knows TensorRT-LLM's names and defaults; knows neither tensors nor files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

DEFAULT_EXCLUDES = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate",
)
ROWWISE_EXCLUDES = ("*ln_f", "*ln_embed", "*lm_head")

FP8, FP8_ROWWISE = "FP8", "FP8_PER_CHANNEL_PER_TOKEN"
W4A16_AWQ, W4A8_AWQ, W4A16_GPTQ = "W4A16_AWQ", "W4A8_AWQ", "W4A16_GPTQ"
W8A16, W4A16 = "W8A16", "W4A16"
SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
SQ_PLUGINS = (
    "W8A8_SQ_PER_TENSOR_PLUGIN",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
)
WEIGHT_ONLY = (W8A16, W4A16)
GROUPWISE = (W4A16_AWQ, W4A8_AWQ, W4A16_GPTQ)
KNOWN_ALGOS = (FP8, FP8_ROWWISE, *GROUPWISE, *WEIGHT_ONLY, SQ_PER_CHANNEL, *SQ_PLUGINS)
# TensorRT-LLM has these too, but the contract does not say enough of their tensors to check them.
UNCHECKED_ALGOS = (
    "W8A16_GPTQ",
    "W4A8_QSERVE_PER_GROUP",
    "W4A8_QSERVE_PER_CHANNEL",
    "FP8_BLOCK_SCALES",
    "INT8",
    "MIXED_PRECISION",
    "NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "W4A8_MXFP4_MXFP8",
    "W4A16_MXFP4",
)
KV_ALGOS = ("FP8", "INT8")


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """TensorRT-LLM's QuantConfig: its loader raises TypeError for any other key.

    exclude_modules: fnmatch patterns over full module names. None means DEFAULT_EXCLUDES; a list replaces
    them altogether.
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: tuple[float, float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: tuple[str, ...] | None = None

    def is_excluded(self, module: str) -> bool:
        """Whether the loader leaves a module (`transformer.layers.0.mlp.fc`) unquantized."""
        patterns = DEFAULT_EXCLUDES if self.exclude_modules is None else self.exclude_modules
        if self.quant_algo == FP8_ROWWISE:
            patterns = (*patterns, *ROWWISE_EXCLUDES)
        return any(fnmatchcase(module, pattern) for pattern in patterns)

    def to_json(self) -> dict[str, Any]:
        """Only what the algorithm reads, so that every release accepts the keys."""
        body: dict[str, Any] = {
            "quant_algo": self.quant_algo,
            "kv_cache_quant_algo": self.kv_cache_quant_algo,
        }
        if self.quant_algo in GROUPWISE:
            body["group_size"] = self.group_size
            body["has_zero_point"] = self.has_zero_point
            body["pre_quant_scale"] = self.pre_quant_scale
        if self.exclude_modules is not None:
            body["exclude_modules"] = list(self.exclude_modules)
        return body


QUANT_KEYS = tuple(field.name for field in fields(QuantConfig))


def read_quant_config(body: Mapping[str, Any]) -> QuantConfig:
    """From the known keys of a `quantization` section; unknown ones are for the check to report."""
    known = {key: value for key, value in body.items() if key in QUANT_KEYS}
    excludes = known.get("exclude_modules")
    if excludes is not None:
        known["exclude_modules"] = tuple(str(pattern) for pattern in excludes)
    clamp = known.get("clamp_val")
    if clamp is not None:
        known["clamp_val"] = (float(clamp[0]), float(clamp[1]))
    return QuantConfig(**known)
