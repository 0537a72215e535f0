"""One way of storing a module's integers, and the bytes that it takes in a compressed-tensors checkpoint."""

from dataclasses import dataclass
from typing import Literal

import torch

from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.packing import num_words
from bitsmith.quantize.qparams import Grid

_WORD_BYTES = 4
SHAPE_BYTES = 16  # weight_shape: two int64, whatever the choice


@dataclass(frozen=True, slots=True, order=True)
class BitChoice:
    """num_bits: of an integer. group_size: columns per scale, "channel" for one scale per output channel."""

    num_bits: int
    group_size: int | Literal["channel"]

    def columns_per_scale(self, num_columns: int) -> int:
        return num_columns if self.group_size == "channel" else self.group_size

    def fits(self, num_columns: int) -> bool:
        return num_columns % self.columns_per_scale(num_columns) == 0

    def __str__(self) -> str:
        reach = "channel" if self.group_size == "channel" else f"group {self.group_size}"
        return f"{self.num_bits} bits, {reach}"


def scheme_choice(scheme: QuantizationScheme) -> BitChoice:
    """What a resolved scheme does with every module."""
    assert scheme.group_size != "auto" and scheme.group_size != "tensor", scheme
    return BitChoice(scheme.num_bits, scheme.group_size)


def choice_grid(
    scheme: QuantizationScheme, choice: BitChoice, num_columns: int, scale_dtype: torch.dtype
) -> Grid:
    group_size = choice.columns_per_scale(num_columns)
    return Grid(choice.num_bits, group_size, scheme.symmetric, scale_dtype, scheme.signed_scale)


def packed_bytes(shape: tuple[int, int], choice: BitChoice, scale_bytes: int, *, symmetric: bool) -> int:
    """Of one module's integers, scales and zero points, where there are any.

    shape: (out, in). scale_bytes: of one scale.
    """
    rows, columns = shape
    groups = columns // choice.columns_per_scale(columns)
    integers = rows * num_words(columns, choice.num_bits) * _WORD_BYTES
    zero_points = 0 if symmetric else num_words(rows, choice.num_bits) * groups * _WORD_BYTES
    return integers + rows * groups * scale_bytes + zero_points
