"""Making linears share what TensorRT-LLM has only one of: q, k, v are one layer, fc and gate one kernel.

Per-tensor FP8 weights get the largest scale, pre-quant scales their mean; what has to change for it is
rounded again, and the error of that is returned so that it can be shown. Equal scales change nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bitsmith.compile.tensorrt_linear import DenseLinear, Fp8Linear, Int4Linear, Int8Linear, Linear
from bitsmith.compile.tensorrt_rounding import int4_linear, int8_linear, relative_error, round_fp8
from bitsmith.core.errors import Refused


def share_scales(
    parts: Sequence[Linear], where: str, *, is_one_layer: bool
) -> tuple[list[Linear], list[float]]:
    """(parts with what they must share, relative error that each took for it).

    is_one_layer: q, k and v, which are joined along rows; else fc and gate, which keep their own integer
    scales and share those of FP8. where: the modules' names. Raises Refused when their kinds differ.
    """
    if not is_one_layer and not all(isinstance(part, Fp8Linear) for part in parts):
        return list(parts), [0.0] * len(parts)
    if len({type(part) for part in parts}) != 1:
        kinds = ", ".join(type(part).__name__.removesuffix("Linear").lower() for part in parts)
        raise Refused(
            f"{where}: TensorRT-LLM fuses these into one layer, but the checkpoint has them as {kinds}. "
            "Quantize all of them alike."
        )
    shared = _share(list(parts), where)
    pairs = zip(parts, shared, strict=True)
    errors = [0.0 if old is new else relative_error(new.dequantize(), old.dequantize()) for old, new in pairs]
    return shared, errors


def _share(parts: list[Linear], where: str) -> list[Linear]:
    fp8 = [part for part in parts if isinstance(part, Fp8Linear)]
    if fp8:
        return list(_share_fp8(fp8, where))
    int8 = [part for part in parts if isinstance(part, Int8Linear)]
    if int8:
        return list(_share_int8(int8))
    int4 = [part for part in parts if isinstance(part, Int4Linear)]
    if int4:
        return list(_share_int4(int4, where))
    assert all(isinstance(part, DenseLinear) for part in parts)
    return parts


def _share_fp8(parts: list[Fp8Linear], where: str) -> list[Fp8Linear]:
    if len({part.is_rowwise for part in parts}) != 1:
        raise Refused(
            f"{where}: FP8 with per-tensor and with per-row scales cannot be fused; quantize alike."
        )
    if parts[0].is_rowwise:
        return parts
    scale = torch.stack([part.scale for part in parts]).amax(dim=0)
    input_scale = _largest([part.input_scale for part in parts])
    shared = []
    for part in parts:
        if not torch.equal(part.scale, scale):
            part = replace(part, weight=round_fp8(part.dequantize(), scale), scale=scale)
        shared.append(_with_input_scale(part, input_scale))
    return shared


def _with_input_scale(part: Fp8Linear, input_scale: Tensor | None) -> Fp8Linear:
    """The same object when nothing changes, so that its error counts as none."""
    if part.input_scale is None or input_scale is None or torch.equal(part.input_scale, input_scale):
        return part
    return replace(part, input_scale=input_scale)


def _share_int8(parts: list[Int8Linear]) -> list[Int8Linear]:
    if _are_equal([part.pre_quant_scale for part in parts]):
        input_scale = _largest([part.input_scale for part in parts])
        assert input_scale is not None
        return [
            part if torch.equal(part.input_scale, input_scale) else replace(part, input_scale=input_scale)
            for part in parts
        ]
    pre_quant = _mean([part.pre_quant_scale for part in parts])
    # The largest that an input, once scaled anew, can be: an upper bound, as only the old maxima are known.
    bounds = [part.input_scale * (pre_quant / part.pre_quant_scale).max().float() for part in parts]
    input_scale = torch.stack(bounds).amax(dim=0)
    return [int8_linear(part.dequantize(), input_scale, pre_quant) for part in parts]


def _share_int4(parts: list[Int4Linear], where: str) -> list[Int4Linear]:
    parts = _fill_zero_points(parts)
    input_scale = _largest([part.input_scale for part in parts])
    weight_scale_2 = _largest([part.weight_scale_2 for part in parts])
    shared = []
    pre_quant_scales = [part.pre_quant_scale for part in parts if part.pre_quant_scale is not None]
    if len(pre_quant_scales) not in (0, len(parts)):
        raise Refused(f"{where}: some have a pre-quant scale and some have none; quantize them alike.")
    is_equal = not pre_quant_scales or _are_equal(pre_quant_scales)
    pre_quant = None if is_equal else _mean(pre_quant_scales)
    for part in parts:
        if pre_quant is not None:
            if part.zero_point is not None:
                raise Refused(f"{where}: asymmetric weights with different pre-quant scales cannot be fused.")
            part = int4_linear(part.dequantize(), part.group_size, pre_quant)
        if input_scale is not None and part.input_scale is not input_scale:
            part = replace(part, input_scale=input_scale, weight_scale_2=weight_scale_2)
        shared.append(part)
    return shared


def _fill_zero_points(parts: list[Int4Linear]) -> list[Int4Linear]:
    if all(part.zero_point is None for part in parts):
        return parts
    return [
        part
        if part.zero_point is not None
        else replace(part, zero_point=torch.zeros(part.scale.shape, dtype=torch.int8))
        for part in parts
    ]


def _largest(scales: Sequence[Tensor | None]) -> Tensor | None:
    present = [scale.float().reshape(1) for scale in scales if scale is not None]
    return torch.stack(present).amax(dim=0) if present else None


def _mean(scales: Sequence[Tensor]) -> Tensor:
    return torch.stack([scale.float() for scale in scales]).mean(dim=0).to(scales[0].dtype)


def _are_equal(scales: Sequence[Tensor]) -> bool:
    return all(torch.equal(scale, scales[0]) for scale in scales)
