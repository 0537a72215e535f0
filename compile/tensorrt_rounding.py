"""Round-to-nearest onto the grids that TensorRT-LLM reads, by the rules of ModelOpt's exporter.

Division and rounding happen in fp32: ModelOpt's TensorRT-LLM checkpoints are byte-equal to this (its
unified checkpoints divide in bf16 and differ in a few percent of the bytes).
"""

import torch
from torch import Tensor

from bitsmith.compile.tensorrt_linear import Fp8Linear, Int4Linear, Int8Linear
from bitsmith.quantize.fp8_weight import FP8_MAX, to_fp8
from bitsmith.quantize.int4_rows import INT4_MAX, INT4_MIN

INT8_MAX = 127
_MIN_ROWWISE_SCALE = 1.0 / (FP8_MAX * 512.0)  # the loader's own floor
_TINY = 1e-12


def round_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """[out, in] -> float8_e4m3fn with weight = result * scale; scale: [1] or [out]."""
    return to_fp8(weight.float(), scale.unsqueeze(1))


def fp8_linear(weight: Tensor, input_scale: Tensor, scale: Tensor | None = None) -> Fp8Linear:
    """Per tensor. scale None: amax(weight) / 448."""
    if scale is None:
        scale = (weight.float().abs().max() / FP8_MAX).clamp_min(_TINY).reshape(1)
    return Fp8Linear(round_fp8(weight, scale), scale, input_scale)


def fp8_rowwise_linear(weight: Tensor) -> Fp8Linear:
    """A scale for each row, amax / 448; activations are scaled for each token at run time."""
    scale = (weight.float().abs().amax(dim=1) / FP8_MAX).clamp_min(_MIN_ROWWISE_SCALE)
    return Fp8Linear(round_fp8(weight, scale), scale, None)


def int8_linear(weight: Tensor, input_scale: Tensor, pre_quant_scale: Tensor) -> Int8Linear:
    """A scale for each row of weight / pre_quant_scale, amax / 127."""
    smoothed = weight.float() / pre_quant_scale.float()
    scale = (smoothed.abs().amax(dim=1) / INT8_MAX).clamp_min(_TINY)
    values = torch.round(smoothed / scale.unsqueeze(1)).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Linear(values, scale, input_scale, pre_quant_scale)


def int4_linear(weight: Tensor, group_size: int, pre_quant_scale: Tensor | None = None) -> Int4Linear:
    """Symmetric, a scale for each group of columns of weight / pre_quant_scale, amax / 7."""
    smoothed = weight.float() if pre_quant_scale is None else weight.float() / pre_quant_scale.float()
    grouped = smoothed.reshape(smoothed.shape[0], -1, group_size)  # [out, num_groups, group_size]
    scale = (grouped.abs().amax(dim=2) / INT4_MAX).clamp_min(_TINY)
    values = torch.round(grouped / scale.unsqueeze(2)).clamp(INT4_MIN, INT4_MAX).to(torch.int8)
    return Int4Linear(values.flatten(1), scale, pre_quant_scale=pre_quant_scale)


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of `exact`; 0 for two zero matrices."""
    difference = float(torch.linalg.vector_norm(approximate.float() - exact.float()))
    norm = float(torch.linalg.vector_norm(exact.float()))
    return difference / norm if norm > 0 else difference
