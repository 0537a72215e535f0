"""A linear as the tensors of a TensorRT-LLM checkpoint, and back (inverse pairs, suffix -> tensor)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bitsmith.compile.tensorrt_linear import DenseLinear, Fp8Linear, Int4Linear, Int8Linear, Linear
from bitsmith.compile.tensorrt_quantization import FP8, FP8_ROWWISE, SQ_PER_CHANNEL
from bitsmith.quantize.int4_rows import pack_rows, unpack_rows

Tensors = dict[str, Tensor]


def to_tensors(linear: Linear, dtype: torch.dtype) -> Tensors:
    """Suffix -> tensor. dtype: the model's, which pre-quant scales and zeros take."""
    if isinstance(linear, DenseLinear):
        tensors = {"weight": linear.weight.to(dtype)}
    elif isinstance(linear, Fp8Linear):
        tensors = _fp8_tensors(linear)
    elif isinstance(linear, Int8Linear):
        tensors = {
            "weight": linear.values,
            "weights_scaling_factor": linear.scale.float(),
            "activation_scaling_factor": linear.input_scale.float(),
            "prequant_scaling_factor": linear.pre_quant_scale.to(dtype),
        }
    else:
        tensors = _int4_tensors(linear, dtype)
    return {suffix: tensor.contiguous() for suffix, tensor in tensors.items()}


def _fp8_tensors(linear: Fp8Linear) -> Tensors:
    if linear.input_scale is None:
        return {"weight": linear.weight, "per_channel_scale": linear.scale.float()}
    return {
        "weight": linear.weight,
        "weights_scaling_factor": linear.scale.float().reshape(1),
        "activation_scaling_factor": linear.input_scale.float().reshape(1),
    }


def _int4_tensors(linear: Int4Linear, dtype: torch.dtype) -> Tensors:
    tensors = {"weight": pack_rows(linear.values), "weights_scaling_factor": linear.scale.float()}
    if linear.pre_quant_scale is not None:
        tensors["prequant_scaling_factor"] = linear.pre_quant_scale.to(dtype)
    if linear.zero_point is not None:
        # The kernel adds `zero`: (q - zero_point) * scale = q * scale + zero; [out, groups] -> [groups, out]
        tensors["zero"] = (-linear.zero_point.float() * linear.scale.float()).T.to(dtype)
    if linear.input_scale is not None and linear.weight_scale_2 is not None:
        tensors["activation_scaling_factor"] = linear.input_scale.float().reshape(1)
        tensors["weights_scaling_factor_2"] = linear.weight_scale_2.float().reshape(1)
    return tensors


def from_tensors(tensors: Mapping[str, Tensor], algo: str | None) -> Linear:
    """Inverse of `to_tensors`, for a linear to which the loader applies `algo`."""
    weight = tensors["weight"]
    if algo == FP8:
        scale, input_scale = tensors["weights_scaling_factor"], tensors["activation_scaling_factor"]
        return Fp8Linear(weight.view(torch.float8_e4m3fn), scale, input_scale)
    if algo == FP8_ROWWISE:
        return Fp8Linear(weight.view(torch.float8_e4m3fn), tensors["per_channel_scale"], None)
    if algo == SQ_PER_CHANNEL:
        return Int8Linear(
            weight,
            tensors["weights_scaling_factor"],
            tensors["activation_scaling_factor"],
            tensors["prequant_scaling_factor"],
        )
    if weight.is_floating_point():
        return DenseLinear(weight)
    return _int4_from(tensors)


def _int4_from(tensors: Mapping[str, Tensor]) -> Int4Linear:
    scale = tensors["weights_scaling_factor"]
    zero_point = None
    if "zero" in tensors:  # as the kernel sees it: rounded to the model's dtype, so no longer an integer
        zero_point = -tensors["zero"].float().T / scale.float()
    return Int4Linear(
        unpack_rows(tensors["weight"]),
        scale,
        zero_point,
        tensors.get("prequant_scaling_factor"),
        tensors.get("activation_scaling_factor"),
        tensors.get("weights_scaling_factor_2"),
    )
