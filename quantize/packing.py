"""Integers of a few bits inside int32 words, as compressed-tensors lays them out, and back.

The first value sits in the lowest bits of the first word. Stored value = value + 2^(num_bits - 1), so
that signed integers become unsigned. Rows whose length does not fill the last word are padded with zero
bits. This module knows nothing of scales, names or files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 32
PACKABLE_BITS = (4, 8)


def num_words(num_values: int, num_bits: int) -> int:
    return -(-num_values * num_bits // WORD_BITS)


def pack_int32(values: Tensor, num_bits: int, *, dim: int = 1) -> Tensor:
    """Pack along `dim`: [rows, columns] int8 -> [rows, num_words(columns)] int32 for dim 1."""
    assert num_bits in PACKABLE_BITS, num_bits
    assert values.dtype == torch.int8 and values.dim() == 2, (values.dtype, values.shape)
    if dim == 0:
        return pack_int32(values.T, num_bits).T.contiguous()
    num_rows, num_columns = values.shape
    stored = (values.to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8)
    per_word = WORD_BITS // num_bits
    stored = F.pad(stored, (0, num_words(num_columns, num_bits) * per_word - num_columns))
    # [rows, words, values per word] -> one int32 for each word
    grouped = stored.view(num_rows, -1, per_word).to(torch.int32)
    words = torch.zeros(grouped.shape[:2], dtype=torch.int32)
    for position in range(per_word):
        words |= grouped[:, :, position] << (position * num_bits)
    return words


def unpack_int32(words: Tensor, num_bits: int, num_values: int, *, dim: int = 1) -> Tensor:
    """Inverse of `pack_int32`: [rows, words] int32 -> [rows, num_values] int8 for dim 1."""
    assert num_bits in PACKABLE_BITS, num_bits
    assert words.dtype == torch.int32 and words.dim() == 2, (words.dtype, words.shape)
    if dim == 0:
        return unpack_int32(words.T, num_bits, num_values).T.contiguous()
    per_word = WORD_BITS // num_bits
    mask = (1 << num_bits) - 1
    stored = torch.stack([words >> (position * num_bits) & mask for position in range(per_word)], dim=2)
    values = stored.flatten(1)[:, :num_values] - (1 << (num_bits - 1))
    return values.to(torch.int8).contiguous()
