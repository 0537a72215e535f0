"""One quantized weight matrix in memory, whatever made it and however a file packs it."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-40  # for all-zero weights: dequantizes to exact zeros, never divides by zero


def integer_range(num_bits: int) -> tuple[int, int]:
    """(quant_min, quant_max) of the signed grid that all formats here share."""
    return -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Integers and the parameters that turn them back: real = (values - zero_point) * scale.

    values: [out, in] int8. scale: [out, num_groups]. zero_point: [out, num_groups] int8, or None for a
    symmetric grid. A group is `group_size` consecutive input columns; one scale for each output channel
    is one group of all columns. Integers and zero points lie in the signed range of `num_bits`.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None
    num_bits: int
    group_size: int

    def __post_init__(self) -> None:
        num_rows, num_columns = self.values.shape
        assert self.values.dtype == torch.int8, self.values.dtype
        assert num_columns % self.group_size == 0, (num_columns, self.group_size)
        num_groups = num_columns // self.group_size
        assert self.scale.shape == (num_rows, num_groups), (self.scale.shape, num_rows, num_groups)
        assert self.zero_point is None or self.zero_point.shape == self.scale.shape, self.scale.shape

    @property
    def is_symmetric(self) -> bool:
        return self.zero_point is None

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    @property
    def num_groups(self) -> int:
        return self.scale.shape[1]

    def dequantize(self) -> Tensor:
        """[out, in] fp32."""
        # [out, in] -> [out, num_groups, group_size]
        grouped = self.values.view(self.out_features, self.num_groups, self.group_size).float()
        if self.zero_point is not None:
            grouped -= self.zero_point.float().unsqueeze(2)
        grouped *= self.scale.float().unsqueeze(2)
        return grouped.flatten(1)

    def with_group_size(self, group_size: int) -> "QuantizedWeight":
        """The same real weights in smaller groups, each with the scale of the group that it was part of."""
        assert self.group_size % group_size == 0, (self.group_size, group_size)
        num_parts = self.group_size // group_size
        zero_point = self.zero_point
        if zero_point is not None:
            zero_point = zero_point.repeat_interleave(num_parts, dim=1)
        scale = self.scale.repeat_interleave(num_parts, dim=1)
        return QuantizedWeight(self.values, scale, zero_point, self.num_bits, group_size)


def tensor_sha256(tensor: Tensor) -> str:
    """Of the values as they lie in memory."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
