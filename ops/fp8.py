"""FP8 weights in the layout that `linear_fp8` reads: row-major bytes, rows padded with zeros to eights."""

from dataclasses import dataclass

import torch
from torch import Tensor

_INPUT_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PackedFp8:
    """weight: [out, in rounded up to 8] uint8, the bits of e4m3. scale: [out] fp32, one for each row."""

    weight: Tensor
    scale: Tensor
    in_features: int


def pack_fp8(values: Tensor, scale: Tensor) -> PackedFp8:
    """values: [out, in] float8_e4m3fn, finite. scale: [1] or [out, 1] fp32."""
    assert values.dtype == torch.float8_e4m3fn, values.dtype
    num_rows, num_columns = values.shape
    weight = torch.nn.functional.pad(values.view(torch.uint8), (0, -num_columns % _INPUT_MULTIPLE))
    return PackedFp8(weight.contiguous(), scale.reshape(-1).expand(num_rows).contiguous(), num_columns)


def unpack_fp8(packed: PackedFp8) -> Tensor:
    """[out, in] fp64: value * scale."""
    values = packed.weight[:, : packed.in_features].contiguous().view(torch.float8_e4m3fn)
    return values.double() * packed.scale.double().unsqueeze(1)
