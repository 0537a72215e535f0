"""Integers of a few bits inside int32 words, as compressed-tensors lays them out, and back.

The first value sits in the lowest bits of the first word, and no bit is left between values: at 3 bits some
begin in one word and end in the next. Stored value = value + 2^(num_bits - 1), so that signed integers become
unsigned. Rows whose length does not fill the last word are padded with zero bits. This module knows nothing
of scales, names or files.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 32
PACKABLE_BITS = (2, 3, 4, 8)


def num_words(num_values: int, num_bits: int) -> int:
    return -(-num_values * num_bits // WORD_BITS)


def values_per_unit(num_bits: int) -> int:
    """The smallest number of values that fills whole words: 8 of 4 bits one word, 32 of 3 bits three."""
    return WORD_BITS // math.gcd(WORD_BITS, num_bits)


def pack_int32(values: Tensor, num_bits: int, *, dim: int = 1) -> Tensor:
    """Pack along `dim`: [rows, columns] int8 -> [rows, num_words(columns)] int32 for dim 1."""
    assert num_bits in PACKABLE_BITS, num_bits
    assert values.dtype == torch.int8 and values.dim() == 2, (values.dtype, values.shape)
    if dim == 0:
        return pack_int32(values.T, num_bits).T.contiguous()
    num_rows, num_columns = values.shape
    stored = (values.to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8)
    unit = values_per_unit(num_bits)
    stored = F.pad(stored, (0, -num_columns % unit))
    # [rows, units, values of a unit] -> [rows, units, words of a unit]
    grouped = stored.view(num_rows, -1, unit).to(torch.int32)
    words = torch.zeros(*grouped.shape[:2], unit * num_bits // WORD_BITS, dtype=torch.int32)
    for position in range(unit):
        word, shift = divmod(position * num_bits, WORD_BITS)
        words[:, :, word] |= grouped[:, :, position] << shift
        if shift + num_bits > WORD_BITS:
            words[:, :, word + 1] |= grouped[:, :, position] >> (WORD_BITS - shift)
    return words.flatten(1)[:, : num_words(num_columns, num_bits)].contiguous()


def unpack_int32(words: Tensor, num_bits: int, num_values: int, *, dim: int = 1) -> Tensor:
    """Inverse of `pack_int32`: [rows, words] int32 -> [rows, num_values] int8 for dim 1."""
    assert num_bits in PACKABLE_BITS, num_bits
    assert words.dtype == torch.int32 and words.dim() == 2, (words.dtype, words.shape)
    if dim == 0:
        return unpack_int32(words.T, num_bits, num_values).T.contiguous()
    unit = values_per_unit(num_bits)
    words_per_unit = unit * num_bits // WORD_BITS
    grouped = F.pad(words, (0, -words.shape[1] % words_per_unit)).view(words.shape[0], -1, words_per_unit)
    stored = torch.stack([_value_at(grouped, position, num_bits) for position in range(unit)], dim=2)
    values = stored.flatten(1)[:, :num_values] - (1 << (num_bits - 1))
    return values.to(torch.int8).contiguous()


def _value_at(units: Tensor, position: int, num_bits: int) -> Tensor:
    """One stored value of every unit. units: [rows, units, words] -> [rows, units]."""
    word, shift = divmod(position * num_bits, WORD_BITS)
    num_low = min(num_bits, WORD_BITS - shift)
    value = units[:, :, word] >> shift & (1 << num_low) - 1
    if num_low < num_bits:
        value = value | (units[:, :, word + 1] & (1 << num_bits - num_low) - 1) << num_low
    return value
