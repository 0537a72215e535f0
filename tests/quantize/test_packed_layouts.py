"""The GPTQ and AWQ layouts: bytes worked out by hand, and packing that unpacking undoes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitsmith.quantize.awq_layout import pack_awq, unpack_awq
from bitsmith.quantize.compressed_tensors import pack_weight, unpack_weight
from bitsmith.quantize.gptq_layout import (
    ZERO_POINTS_LESS_ONE_BITS,
    ZeroPointLabel,
    pack_gptq,
    unpack_values,
    unpack_zero_points,
)
from bitsmith.quantize.weight import QuantizedWeight, integer_range


def weight_of(
    values: Tensor, zero_point: Tensor | None, num_bits: int = 4, group_size: int = 8
) -> QuantizedWeight:
    num_groups = values.shape[1] // group_size
    scale = torch.arange(1, values.shape[0] * num_groups + 1).view(-1, num_groups).to(torch.float16) / 64
    return QuantizedWeight(values, scale, zero_point, num_bits, group_size)


def hexadecimal(words: Tensor) -> list[list[str]]:
    return [[f"{word & 0xFFFFFFFF:08X}" for word in row] for row in words.tolist()]


# Eight outputs, eight inputs. Output r has the unsigned integers r, r+1, ... modulo 16 along its inputs, and
# the zero points below, unsigned too.
STORED = (torch.arange(8)[:, None] + torch.arange(8)[None, :]) % 16
ZEROS = torch.tensor([1, 7, 8, 15, 2, 9, 8, 3])
# Each output's inputs, 7 (highest nibble) to 0.
WORDS = ["76543210", "87654321", "98765432", "A9876543", "BA987654", "CBA98765", "DCBA9876", "EDCBA987"]
HAND = weight_of((STORED - 8).to(torch.int8), (ZEROS - 8).to(torch.int8)[:, None])


def test_gptq_packs_inputs_from_the_lowest_nibble_up() -> None:
    tensors = pack_gptq(HAND, "gptq_v2")
    expected = [
        "76543210",
        "87654321",
        "98765432",
        "A9876543",
        "BA987654",
        "CBA98765",
        "DCBA9876",
        "EDCBA987",
    ]
    assert hexadecimal(tensors["qweight"]) == [expected]
    assert hexadecimal(tensors["qzeros"]) == [["3892F871"]]  # outputs 7 to 0
    assert torch.equal(tensors["scales"], HAND.scale.T)
    assert tensors["g_idx"].tolist() == [0] * 8 and tensors["g_idx"].dtype == torch.int32


def test_gptq_version_one_stores_zero_points_less_one() -> None:
    assert hexadecimal(pack_gptq(HAND, "gptq")["qzeros"]) == [["2781E760"]]
    symmetric = weight_of(HAND.values, None)
    assert hexadecimal(pack_gptq(symmetric, "gptq")["qzeros"]) == [["77777777"]]
    assert hexadecimal(pack_gptq(symmetric, "gptq_v2")["qzeros"]) == [["88888888"]]


def test_three_bits_cross_words_as_one_stream() -> None:
    """Thirty-two inputs in three words; the eleventh and the twenty-second value lie in two words."""
    stored = torch.arange(32) % 8
    weight = weight_of((stored - 4).to(torch.int8)[None, :].repeat(32, 1), None, num_bits=3)
    stream = sum(int(value) << (3 * index) for index, value in enumerate(stored))
    expected = [f"{stream >> 32 * word & 0xFFFFFFFF:08X}" for word in range(3)]
    qweight = pack_gptq(weight, "gptq_v2")["qweight"]
    assert hexadecimal(qweight[:, :1]) == [[word] for word in expected]
    assert hexadecimal(pack_weight("m", weight)["m.weight_packed"][:1]) == [expected]


def test_a_zero_point_of_zero_borrows_from_its_neighbour_as_gptqmodel_writes_it() -> None:
    zero_point = torch.tensor([0, 7, 8, 15, 0, 0, 8, 8], dtype=torch.int8)[:, None] - 8
    words = pack_gptq(weight_of(HAND.values, zero_point), "gptq")["qzeros"]
    # The zero points 8 8 0 0 15 8 7 0 as one word, 8800F870, less 11111111.
    assert hexadecimal(words) == [["76EFE75F"]]
    assert torch.equal(unpack_zero_points(words, 4, "gptq"), zero_point)


def test_awq_packs_outputs_with_the_even_ones_first() -> None:
    tensors = pack_awq(HAND)
    # Row k is input k: outputs 7 5 3 1 6 4 2 0 from the highest nibble down.
    assert hexadecimal(tensors["qweight"])[:2] == [["75316420"], ["86427531"]]
    assert hexadecimal(tensors["qzeros"]) == [["39F78281"]]
    assert torch.equal(tensors["scales"], HAND.scale.T)


def test_compressed_tensors_packs_inputs_and_zero_points_along_outputs() -> None:
    tensors = pack_weight("m", HAND)
    assert hexadecimal(tensors["m.weight_packed"]) == [[word] for word in WORDS]
    assert hexadecimal(tensors["m.weight_zero_point"]) == [["3892F871"]]
    assert tensors["m.weight_shape"].tolist() == [8, 8]


@st.composite
def weights(draw: st.DrawFn, widths: tuple[int, ...] = (2, 3, 4, 8)) -> QuantizedWeight:
    num_bits = draw(st.sampled_from(widths))
    num_rows, num_groups, group_size = draw(st.integers(1, 3)) * 32, draw(st.integers(1, 4)) * 4, 8
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    low, high = integer_range(num_bits)

    def integers(num_columns: int) -> Tensor:
        shape = (num_rows, num_columns)
        return torch.randint(low, high + 1, shape, dtype=torch.int8, generator=generator)

    zero_point = integers(num_groups) if draw(st.booleans()) else None
    return weight_of(integers(num_groups * group_size), zero_point, num_bits, group_size)


def zeros_of(weight: QuantizedWeight) -> Tensor:
    zero_point = weight.zero_point
    return torch.zeros(weight.scale.shape, dtype=torch.int8) if zero_point is None else zero_point


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_unpacking_undoes_gptq(label: ZeroPointLabel, data: st.DataObject) -> None:
    weight = data.draw(weights() if label == "gptq_v2" else weights(widths=ZERO_POINTS_LESS_ONE_BITS))
    tensors = pack_gptq(weight, label)
    assert torch.equal(unpack_values(tensors["qweight"], weight.num_bits), weight.values)
    assert torch.equal(unpack_zero_points(tensors["qzeros"], weight.num_bits, label), zeros_of(weight))


@settings(max_examples=50, deadline=None)
@given(weight=weights(widths=(4,)))
def test_unpacking_undoes_awq(weight: QuantizedWeight) -> None:
    tensors = pack_awq(weight)
    assert torch.equal(unpack_awq(tensors["qweight"]), weight.values)
    assert torch.equal(unpack_awq(tensors["qzeros"]), zeros_of(weight))


@settings(max_examples=50, deadline=None)
@given(weight=weights())
def test_unpacking_undoes_compressed_tensors(weight: QuantizedWeight) -> None:
    tensors = pack_weight("m", weight)
    back = unpack_weight("m", tensors.__getitem__, tensors.__contains__, (weight.num_bits,))
    assert torch.equal(back.values, weight.values) and torch.equal(back.scale, weight.scale)
    assert back.is_symmetric == weight.is_symmetric
    assert torch.equal(zeros_of(back), zeros_of(weight))
