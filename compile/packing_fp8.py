"""FP8 weights of a checkpoint as the decoder's packed tensors: bytes kept, a scale for each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitsmith.compile.decoder_plan import Activations, LinearSpec
from bitsmith.ops.fp8 import pack_fp8
from bitsmith.quantize.fp8_weight import Fp8Weight


def fuse_fp8_rows(weights: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """One weight of all rows, or None where inputs are rounded with different scales."""
    if len({weight.input_scale for weight in weights}) != 1:
        return None
    values = torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
    scale = torch.cat([weight.scale.expand(weight.out_features, 1) for weight in weights])
    return Fp8Weight(values, scale, weights[0].input_scale)


def pack_fp8_part(
    part: str, weight: Fp8Weight, activations: Activations, has_bias: bool, tensors: dict[str, Tensor]
) -> LinearSpec:
    """Pack one product's weight into `tensors`; returns its shape and arithmetic."""
    packed = pack_fp8(weight.values, weight.scale)
    tensors[f"{part}.weight"], tensors[f"{part}.scale"] = packed.weight, packed.scale
    return LinearSpec(
        in_features=weight.in_features,
        out_features=weight.out_features,
        num_bits=8,
        group_size=0,
        activations=activations,
        has_bias=has_bias,
        has_zero_point=False,
        is_fp8=True,
        input_scale=weight.input_scale if activations == "fp8" else None,
    )
