"""What is reported of quantized modules and of those left as they were."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.manifest import Fallback
from bitsmith.quantize.weight import QuantizedWeight, tensor_sha256


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """One quantized module.

    relative_error: ||(W - real) X|| / ||W X|| over the calibration tokens; None where none were used, and
    after refinement. With INT8 inputs it is the output's, on a sample, weights and inputs rounded.
    sqnr_db: signal to quantization noise of the weights themselves; None for an exact result.
    damping: fraction of the mean diagonal of H that was added; None where no Hessian was used.
    seconds: wall time, an equal share of what modules with one input took together.
    alpha: strength of the scales between weights and inputs, 0 where none did better; folded_into: the
    operator whose outputs they divide. None where the method has none, or there is nothing to fold into.
    """

    name: str
    method: str
    num_bits: int
    group_size: int
    relative_error: float | None
    sqnr_db: float | None
    damping: float | None
    seconds: float
    dequantized_sha256: str
    alpha: float | None = None
    folded_into: str | None = None


@dataclass(frozen=True, slots=True)
class UnquantizedModule:
    """A module that keeps its weights as they are, and why."""

    name: str
    reason: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RefineRecord:
    """What learning did to one layer.

    held_out_before, held_out_after: ||output - target||^2 / ||target||^2 on the rows that were not learned
    from; target is the unquantized model's. losses: the same of each step's own rows. kept: whether held-out
    rows came closer, else the layer is as it was.
    """

    layer: str
    kept: bool
    held_out_before: float
    held_out_after: float
    losses: Sequence[float]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Everything that one layer adds to the manifest.

    changed: SHA-256 of tensors that are not quantized and still differ from the source's, by full name.
    """

    modules: Sequence[ModuleRecord]
    fallbacks: Sequence[Fallback]
    kv_scales: tuple[float, float] | None
    refine: RefineRecord | None = None
    changed: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "LayerReport":
        scales, refine = body["kv_scales"], body["refine"]
        return cls(
            tuple(ModuleRecord(**entry) for entry in body["modules"]),
            tuple(Fallback(**entry) for entry in body["fallbacks"]),
            None if scales is None else (scales[0], scales[1]),
            None if refine is None else RefineRecord(**refine),
            body["changed"],
        )


def refined_record(record: ModuleRecord, weight: Tensor, quantized: QuantizedWeight) -> ModuleRecord:
    """The record of a module whose integers and scales learned on. weight: the original, [out, in].

    Its own output's error is no longer known: what was lowered is the layer's.
    """
    real = quantized.dequantize()
    return dataclasses.replace(
        record,
        method=f"{record.method}+signround",
        relative_error=None,
        sqnr_db=weight_sqnr_db(weight, real),
        dequantized_sha256=tensor_sha256(real),
    )


def weight_sqnr_db(weight: Tensor, real: Tensor) -> float | None:
    """weight, real: [out, in]."""
    noise = float((weight - real).double().square().sum())
    signal = float(weight.double().square().sum())
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None


def relative_output_error(weight: Tensor, real: Tensor, hessian: Tensor) -> float | None:
    """||(W - real) X|| / ||W X|| from H = X^T X. None when the outputs are all zero."""
    error = weight - real
    lost = float(((error @ hessian) * error).double().sum())
    signal = float(((weight @ hessian) * weight).double().sum())
    return math.sqrt(max(lost, 0.0) / signal) if signal > 0 else None


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
