"""Reading GPTQ and AWQ checkpoints for TensorRT-LLM: packed integers with scales by group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bitsmith.compile.tensorrt_linear import DenseLinear, Int4Linear, SourceLinear, WeightOnlyLinear
from bitsmith.compile.tensorrt_quantization import W4A16_AWQ, W8A16
from bitsmith.compile.tensorrt_source_scheme import SourceScheme
from bitsmith.core.errors import Refused
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class PackedSource:
    """All its quantized linears have one width and one group size; others are dense."""

    weights: WeightSource
    scheme: SourceScheme = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", _read_scheme(self.weights))

    @property
    def path(self) -> Path:
        return self.weights.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.weights.config

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.weights

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(name)

    def is_quantized(self, module: str) -> bool:
        return f"{module}.weight" in self.weights and not isinstance(self.weights.linear(module), Tensor)

    def linear(self, module: str) -> SourceLinear:
        weight = _integers(self.weights, module)
        if weight is None:
            return DenseLinear(self.weights.tensor(f"{module}.weight"))
        if weight.num_bits == 8:
            return WeightOnlyLinear(weight.values, weight.scale, weight.zero_point)
        return Int4Linear(weight.values, weight.scale, weight.zero_point)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        return None


def _integers(weights: WeightSource, module: str) -> QuantizedWeight | None:
    """None: stored dense. Raises Refused for what TensorRT-LLM's group-wise kernels cannot take."""
    weight = weights.linear(module)
    if isinstance(weight, Tensor):
        return None
    if not isinstance(weight, QuantizedWeight):
        raise Refused(
            f"{weights.path}: {module} has groups of columns that are not neighbours (g_idx), which are not "
            "exported. Quantize the model again with static groups."
        )
    if weight.num_bits == 4 and bool((weight.scale < 0).any()):
        raise Refused(
            f"{weights.path}: {module} has negative scales, which TensorRT-LLM does not take. "
            "Quantize again with --for tensorrt-llm (or tensorrt-llm-pytorch)."
        )
    return weight


def _read_scheme(weights: WeightSource) -> SourceScheme:
    """Reads every weight, so that what cannot be exported is refused before work."""
    kinds: dict[tuple[int, int], str] = {}
    symmetric, is_channel = True, True
    for name in weights.names:
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        weight = _integers(weights, module)
        if weight is not None:
            kinds.setdefault((weight.num_bits, 0 if weight.num_bits == 8 else weight.group_size), module)
            symmetric = symmetric and weight.is_symmetric
            is_channel = is_channel and weight.num_groups == 1
    if not kinds:
        return SourceScheme()
    for (num_bits, _), module in kinds.items():
        if num_bits not in (4, 8):
            raise Refused(
                f"{weights.path}: {num_bits}-bit weights ({module}) are not exported to TensorRT-LLM; 4 "
                "and 8 bits are."
            )
    if is_channel and min(kinds)[0] == 4:
        raise Refused(
            f"{weights.path} has one 4-bit scale per channel; TensorRT-LLM's group-wise kernels need groups "
            "of 64 or 128. Quantize again with --group-size 128."
        )
    if len(kinds) > 1:
        found = ", ".join(f"{bits} bits in groups of {size} ({name})" for (bits, size), name in kinds.items())
        raise Refused(f"{weights.path} has {found}; TensorRT-LLM's checkpoints here have one kind.")
    ((num_bits, group_size),) = kinds
    if num_bits == 8:
        return SourceScheme(W8A16)
    return SourceScheme(W4A16_AWQ, None, group_size, symmetric)
