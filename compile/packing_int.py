"""Integer weights of a checkpoint as the decoder's packed tensors: rows joined, groups as int8 wants."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bitsmith.compile.decoder_plan import Activations, LinearSpec
from bitsmith.ops.packing import NARROWEST_BITS, pack_quantized
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.weight import QuantizedWeight

_MAX_INT8_GROUP_SIZE = 128  # the widest that is compiled as the checkpoint has it


def fuse_integer_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight of all rows, or None where the parts are not stored alike."""
    if len({(weight.num_bits, weight.group_size, weight.is_symmetric) for weight in weights}) != 1:
        return None
    zero_points = [weight.zero_point for weight in weights if weight.zero_point is not None]
    return QuantizedWeight(
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scale for weight in weights]),
        torch.cat(zero_points) if zero_points else None,
        weights[0].num_bits,
        weights[0].group_size,
    )


def fuse_int8_rows(weights: Sequence[Int8Weight]) -> Int8Weight | None:
    """The same of weights whose inputs are int8: None where those are rounded with different scales."""
    if len({weight.input_scale for weight in weights}) != 1:
        return None
    fused = fuse_integer_rows([weight.integers for weight in weights])
    return None if fused is None else replace(weights[0], integers=fused)


def pack_integer_part(
    part: str,
    weight: QuantizedWeight | Int8Weight,
    activations: Activations,
    has_bias: bool,
    tensors: dict[str, Tensor],
) -> LinearSpec:
    """Pack one product's weight into `tensors`; returns its shape and arithmetic.

    int8 activations have one scale for each token and group of the weight. Where the checkpoint says that
    they have one for each token, the row stays whole. Integers of 2 and 3 bits are packed as 4.
    """
    # Each kind of narrow activations belongs to its own kind of weights; beside it, others take bf16.
    activations = "bf16" if activations == "fp8" else activations
    if isinstance(weight, Int8Weight):
        weight = weight.integers
    elif activations == "int8":
        weight = _split_for_int8(weight)
    stored_bits, weight = weight.num_bits, _widened(weight)
    packed = pack_quantized(
        weight.values, weight.scale, weight.zero_point, weight.group_size, weight.num_bits
    )
    tensors[f"{part}.weight"], tensors[f"{part}.scale"] = packed.weight, packed.scale
    if packed.zero_point is not None:
        tensors[f"{part}.zero_point"] = packed.zero_point
    return LinearSpec(
        weight.in_features,
        weight.out_features,
        weight.num_bits,
        weight.group_size,
        activations,
        has_bias,
        packed.zero_point is not None,
        checkpoint_bits=None if stored_bits == weight.num_bits else stored_bits,
    )


def _widened(weight: QuantizedWeight) -> QuantizedWeight:
    """The same integers, which the narrowest layout of the operators holds; nothing is rounded."""
    return weight if weight.num_bits >= NARROWEST_BITS else replace(weight, num_bits=NARROWEST_BITS)


def _split_for_int8(weight: QuantizedWeight) -> QuantizedWeight:
    """Smaller groups where they are wide: over a whole row one outlier takes the range from all other
    columns."""
    if weight.group_size <= _MAX_INT8_GROUP_SIZE:
        return weight
    sizes = (size for size in (64, 32, 16, 8) if weight.group_size % size == 0)
    return weight.with_group_size(next(sizes, weight.group_size))
