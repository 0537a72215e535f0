"""Packing is invertible and is compressed-tensors' own layout."""

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsmith.quantize.packing import num_words, pack_int32, unpack_int32

shapes = st.tuples(st.integers(1, 40), st.integers(1, 70))


def integers(shape: tuple[int, int], num_bits: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (num_bits - 1)
    return torch.randint(-half, half, shape, dtype=torch.int8, generator=generator)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([2, 3, 4, 8]), st.sampled_from([0, 1]), st.integers(0, 1000))
def test_unpack_undoes_pack(shape: tuple[int, int], num_bits: int, dim: int, seed: int) -> None:
    values = integers(shape, num_bits, seed)
    packed = pack_int32(values, num_bits, dim=dim)
    assert packed.shape[dim] == num_words(shape[dim], num_bits)
    assert torch.equal(unpack_int32(packed, num_bits, shape[dim], dim=dim), values)


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([2, 3, 4, 8]), st.sampled_from([0, 1]), st.integers(0, 1000))
def test_layout_is_that_of_compressed_tensors(
    shape: tuple[int, int], num_bits: int, dim: int, seed: int
) -> None:
    values = integers(shape, num_bits, seed)
    theirs = pack_to_int32(values, num_bits, packed_dim=dim)
    assert torch.equal(pack_int32(values, num_bits, dim=dim), theirs)


def test_first_value_is_the_lowest_nibble_and_minus_eight_is_zero() -> None:
    values = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8)
    packed = pack_int32(values, 4)
    assert int(packed.item()) & 0xFFFFFFFF == 0xF6543210
