import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsmith.core.errors import Refused
from bitsmith.ops.packing import pack_dense, pack_quantized, unpack_quantized


def random_weight(
    seed: int, num_bits: int, out_features: int, in_features: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (num_bits - 1)), 1 << (num_bits - 1)
    groups = in_features // group_size
    values = torch.randint(low, high, (out_features, in_features), generator=generator, dtype=torch.int8)
    scale = torch.rand(out_features, groups, generator=generator)
    zero_point = torch.randint(low, high, (out_features, groups), generator=generator, dtype=torch.int8)
    return values, scale, zero_point


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_bits=st.sampled_from([4, 8]),
    out_features=st.integers(1, 70),
    group_size=st.sampled_from([8, 16, 24, 64]),
    num_groups=st.integers(1, 5),
    asymmetric=st.booleans(),
)
def test_unpacking_inverts_packing(
    seed: int, num_bits: int, out_features: int, group_size: int, num_groups: int, asymmetric: bool
) -> None:
    in_features = group_size * num_groups
    values, scale, zero_point = random_weight(seed, num_bits, out_features, in_features, group_size)
    packed = pack_quantized(values, scale, zero_point if asymmetric else None, group_size, num_bits)
    got_values, got_scale, got_zero_point = unpack_quantized(packed)
    assert torch.equal(got_values, values)
    assert torch.equal(got_scale, scale)
    assert (got_zero_point is not None) == asymmetric
    assert got_zero_point is None or torch.equal(got_zero_point, zero_point)
    for tensor in (packed.weight, packed.scale, packed.zero_point):
        assert tensor is None or (tensor.is_contiguous() and tensor.nbytes % 64 == 0)
    assert packed.weight.nbytes == -(-out_features // 16) * 16 * group_size * num_groups * num_bits // 8


def test_where_each_value_stands() -> None:
    values = torch.zeros(16, 8, dtype=torch.int8)
    values[3, 2], values[3, 6] = -8, 7
    packed = pack_quantized(values, torch.ones(16, 1), None, 8, 4)
    assert packed.weight.flatten()[3 * 4 + 2] == (7 + 8) << 4 | 0
    assert packed.weight.flatten()[3 * 4 + 1] == 0x88


def test_scales_that_bf16_holds_are_stored_in_bf16() -> None:
    values = torch.zeros(16, 8, dtype=torch.int8)
    exact, inexact = torch.full((16, 1), 0.75), torch.full((16, 1), 0.1)
    assert pack_quantized(values, exact, None, 8, 8).scale.dtype == torch.bfloat16
    assert pack_quantized(values, inexact, None, 8, 8).scale.dtype == torch.float32


@pytest.mark.parametrize(("group_size", "columns"), [(12, 24), (16, 24), (0, 8)])
def test_group_sizes_that_cannot_be_packed_are_refused(group_size: int, columns: int) -> None:
    values = torch.zeros(4, columns, dtype=torch.int8)
    with pytest.raises(Refused, match=f"Group size {group_size} .* {columns} columns"):
        pack_quantized(values, torch.ones(4, 1), None, group_size, 4)


def test_other_widths_are_refused() -> None:
    with pytest.raises(Refused, match="Weights of 3 bits"):
        pack_quantized(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1), None, 8, 3)


def test_dense_weights_stay_row_major() -> None:
    weight = torch.randn(6, 4).T
    packed = pack_dense(weight)
    assert torch.equal(packed, weight) and packed.is_contiguous()
    assert pack_dense(torch.randn(2, 2).half()).dtype == torch.float32
