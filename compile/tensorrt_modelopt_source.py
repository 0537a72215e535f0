"""ModelOpt's unified Hugging Face checkpoints as sources of an export: linears in TensorRT-LLM's kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.tensorrt_linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    SourceLinear,
    WeightOnlyLinear,
)
from bitsmith.compile.tensorrt_quantization import (
    FP8,
    FP8_ROWWISE,
    SQ_PER_CHANNEL,
    W4A8_AWQ,
    W4A16_AWQ,
    W8A16,
)
from bitsmith.compile.tensorrt_source_scheme import SourceScheme
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.quantize.int4_rows import unpack_rows
from bitsmith.quantize.modelopt_config import QUANT_CONFIG_NAME, modelopt_kv_scales, modelopt_section

READABLE_ALGOS = (None, FP8, FP8_ROWWISE, W4A16_AWQ, W4A8_AWQ, SQ_PER_CHANNEL, W8A16)


@dataclass(frozen=True, slots=True)
class ModelOptSource:
    """A unified checkpoint; a module without a scale is dense."""

    reader: CheckpointReader
    scheme: SourceScheme = field(init=False)

    def __post_init__(self) -> None:
        section = modelopt_section(self.reader)
        assert section is not None
        object.__setattr__(self, "scheme", _scheme(self.reader, section))

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.reader.config

    def __contains__(self, name: object) -> bool:
        return name in self.reader

    def tensor(self, name: str) -> Tensor:
        return self.reader.tensor(name)

    def is_quantized(self, module: str) -> bool:
        return f"{module}.weight_scale" in self.reader

    def linear(self, module: str) -> SourceLinear:
        weight = self.reader.tensor(f"{module}.weight")
        scale = self._optional(f"{module}.weight_scale")
        if scale is None:
            return DenseLinear(weight)
        algo = self.scheme.quant_algo
        input_scale = self._scalar(f"{module}.input_scale")
        pre_quant = self._optional(f"{module}.pre_quant_scale")
        if algo == FP8:
            if input_scale is None:
                raise Refused(
                    f"{self.path}: {module} has no input_scale; static FP8 needs one. Calibrate it."
                )
            return Fp8Linear(weight, scale.float().reshape(1), input_scale)
        if algo == FP8_ROWWISE:
            return Fp8Linear(weight, scale.float(), None)
        if algo == W8A16:
            return WeightOnlyLinear(weight, scale.unsqueeze(1))
        if algo == SQ_PER_CHANNEL:
            if input_scale is None:
                raise Refused(
                    f"{self.path}: {module} has no input_scale; SmoothQuant needs one. Calibrate it."
                )
            ones = torch.ones(weight.shape[1], dtype=self._dtype())
            return Int8Linear(weight, scale, input_scale, ones if pre_quant is None else pre_quant)
        scale_2 = self._scalar(f"{module}.weight_scale_2")
        return Int4Linear(unpack_rows(weight), scale, None, pre_quant, input_scale, scale_2)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        return modelopt_kv_scales(self.reader, layer)

    def _optional(self, name: str) -> Tensor | None:
        return self.reader.tensor(name) if name in self.reader else None

    def _scalar(self, name: str) -> Tensor | None:
        value = self._optional(name)
        return None if value is None else value.float().reshape(1)

    def _dtype(self) -> torch.dtype:
        return self.reader.dtype("model.embed_tokens.weight")


def _scheme(reader: CheckpointReader, section: Mapping[str, Any]) -> SourceScheme:
    algo, kv_algo = section.get("quant_algo"), section.get("kv_cache_quant_algo")
    if algo not in READABLE_ALGOS:
        known = ", ".join(str(name) for name in READABLE_ALGOS if name is not None)
        raise Refused(f"{reader.path} has quant_algo {algo!r}; {known} can be exported for engines.")
    if kv_algo not in (None, "FP8"):
        raise Refused(f"{reader.path} has a KV cache of type {kv_algo!r}; FP8 can be exported for engines.")
    if section.get("has_zero_point"):
        raise Refused(f"{reader.path} declares zero points, which unified checkpoints cannot hold.")
    is_awq = algo in (W4A16_AWQ, W4A8_AWQ)
    group_size = int(section.get("group_size") or 0) if is_awq else 0
    if is_awq and group_size == 0:
        raise Refused(
            f"{reader.path / QUANT_CONFIG_NAME} lacks group_size; write the size that the scales have."
        )
    has_pre_quant = any(name.endswith(".pre_quant_scale") for name in reader.names)
    return SourceScheme(algo, kv_algo, group_size, has_pre_quant_scale=is_awq and has_pre_quant)
