"""Weights in the layouts that the operators read.

Layout `rows16-v1`: rows in blocks of 16. 4 bits: 64 bytes hold 8 inputs of the block, byte `row * 4 + j`
has input `j` in its low and input `j + 4` in its high nibble, stored as value + 8. 8 bits: 64 bytes hold 4
inputs, byte `row * 4 + j` is input `j` in two's complement. Scales and zero points: [blocks, groups, 16],
blocks rounded up to four so that every tensor is a multiple of 64 bytes. Rows that only fill up have
scale 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.core.errors import Refused

LAYOUT_ROWS16 = "rows16-v1"
ROW_BLOCK = 16
NARROWEST_BITS = 4
_BLOCK_MULTIPLE = 4  # of scales and zero points
_INPUT_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A quantized weight as `linear_quantized` takes it. B = row blocks, G = groups.

    weight: [B, in / 8, 64] uint8 for 4 bits, [B, in / 4, 64] int8 for 8 bits.
    scale: [B4, G, 16] bf16 where that loses nothing, else fp32; B4 is B rounded up to a multiple of 4.
    zero_point: [B4, G, 16] int8, or None for symmetric weights.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    in_features: int
    out_features: int
    group_size: int
    num_bits: int
    layout: str = LAYOUT_ROWS16


def pack_quantized(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, num_bits: int
) -> PackedLinear:
    """values: [out, in] int8 in the signed range of num_bits. scale, zero_point: [out, groups]."""
    out_features, in_features = values.shape
    _check(values, scale, zero_point, group_size, num_bits)
    padded = _pad_rows(values, ROW_BLOCK)
    if num_bits == 4:
        # [B, row, chunk, half, j] -> [B, chunk, row, j], half 0 in the low nibble
        stored = (padded + 8).to(torch.uint8).view(-1, ROW_BLOCK, in_features // 8, 2, 4)
        nibbles = stored[:, :, :, 0] | (stored[:, :, :, 1] << 4)
    else:
        nibbles = padded.view(-1, ROW_BLOCK, in_features // 4, 4)
    weight = nibbles.transpose(1, 2).contiguous().flatten(2)
    return PackedLinear(
        weight=weight,
        scale=_pack_rows(_narrow(scale)),
        zero_point=None if zero_point is None else _pack_rows(zero_point),
        in_features=in_features,
        out_features=out_features,
        group_size=group_size,
        num_bits=num_bits,
    )


def unpack_quantized(packed: PackedLinear) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse: values int8 [out, in], scale [out, groups], zero_point [out, groups] or None."""
    rows, columns = packed.out_features, packed.in_features
    chunks = packed.weight.view(packed.weight.shape[0], -1, ROW_BLOCK, 4)  # [B, chunk, row, j]
    if packed.num_bits == 4:
        halves = torch.stack((chunks & 15, chunks >> 4), dim=3).to(torch.int8) - 8
        values = halves.transpose(1, 2).reshape(-1, columns)
    else:
        values = chunks.transpose(1, 2).reshape(-1, columns)
    zero_point = None if packed.zero_point is None else _unpack_rows(packed.zero_point, rows)
    return values[:rows].contiguous(), _unpack_rows(packed.scale, rows), zero_point


def pack_dense(weight: Tensor) -> Tensor:
    """A dense weight as `linear_dense` takes it: contiguous [out, in], bf16 or fp32.

    Row-major, so that a tied embedding shares it.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    return weight.contiguous()


def _check(values: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, num_bits: int) -> None:
    if num_bits not in (4, 8):
        raise Refused(f"Weights of {num_bits} bits cannot be packed; 4 and 8 can.")
    out_features, in_features = values.shape
    if group_size <= 0 or group_size % _INPUT_MULTIPLE or in_features % group_size:
        raise Refused(
            f"Group size {group_size} cannot be packed: it must be a multiple of {_INPUT_MULTIPLE} that "
            f"divides the weight's {in_features} columns."
        )
    shape = (out_features, in_features // group_size)
    assert values.dtype == torch.int8, values.dtype
    assert tuple(scale.shape) == shape, (scale.shape, shape)
    assert zero_point is None or (tuple(zero_point.shape) == shape and zero_point.dtype == torch.int8)
    low, high = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    assert values.numel() == 0 or (int(values.min()) >= low and int(values.max()) <= high), num_bits


def _narrow(scale: Tensor) -> Tensor:
    """To bf16 where that loses nothing, else to fp32."""
    narrow, wide = scale.to(torch.bfloat16), scale.to(torch.float32)
    return narrow if torch.equal(narrow.to(torch.float32), wide) else wide


def _pad_rows(rows: Tensor, multiple: int) -> Tensor:
    missing = -rows.shape[0] % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).contiguous()


def _pack_rows(rows: Tensor) -> Tensor:
    """[out, G] -> [B4, G, 16]"""
    padded = _pad_rows(rows, ROW_BLOCK * _BLOCK_MULTIPLE)
    return padded.view(-1, ROW_BLOCK, rows.shape[1]).transpose(1, 2).contiguous()


def _unpack_rows(packed: Tensor, num_rows: int) -> Tensor:
    """[B4, G, 16] -> [out, G]"""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:num_rows].contiguous()
