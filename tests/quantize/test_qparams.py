"""Scales, zero points and rounding: exact values, laws, and what happens to groups without range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsmith.quantize.qparams import Grid, QParams, choose_qparams, quantize, search_qparams

GRIDS = [
    Grid(bits, 8, symmetric, dtype)
    for bits in (4, 8)
    for symmetric in (True, False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


def random_weight(seed: int, rows: int = 5, columns: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


def weighted_error(
    weight: torch.Tensor, qparams: QParams, importance: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """[out, num_groups]."""
    error = (quantize(weight, qparams, grid).dequantize() - weight).square() * importance
    return error.view(error.shape[0], -1, grid.group_size).sum(dim=2)


def test_symmetric_range_spans_the_largest_magnitude() -> None:
    weight = torch.tensor([[7.5, -3.0, 1.0, 0.0]])
    quantized = quantize(weight, choose_qparams(weight, Grid(4, 4, True)), Grid(4, 4, True))
    assert quantized.scale.tolist() == [[1.0]]
    assert quantized.values.tolist() == [[7, -3, 1, 0]]
    assert quantized.zero_point is None


def test_asymmetric_range_reaches_both_ends_exactly() -> None:
    weight = torch.tensor([[-1.0, 14.0, 3.0, 0.0]])
    quantized = quantize(weight, choose_qparams(weight, Grid(4, 4, False)), Grid(4, 4, False))
    assert quantized.zero_point is not None and quantized.zero_point.tolist() == [[-7]]
    assert quantized.dequantize().tolist() == weight.tolist()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_zero_is_exact_and_groups_of_zeros_stay_finite(grid: Grid) -> None:
    weight = random_weight(0)
    weight[:, :8] = 0
    weight[2] = 0
    weight[1, 9] = 0
    for qparams in (choose_qparams(weight, grid), search_qparams(weight, torch.ones(24), grid)):
        real = quantize(weight, qparams, grid).dequantize()
        assert bool(torch.isfinite(real).all()) and bool(torch.isfinite(qparams.scale).all())
        assert bool((real[weight == 0] == 0).all())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GRIDS), st.integers(0, 10_000))
def test_quantizing_what_was_dequantized_changes_nothing(grid: Grid, seed: int) -> None:
    weight = random_weight(seed)
    qparams = choose_qparams(weight, grid)
    once = quantize(weight, qparams, grid)
    twice = quantize(once.dequantize(), qparams, grid)
    assert torch.equal(once.values, twice.values)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GRIDS), st.integers(0, 10_000))
def test_search_is_never_worse_than_the_plain_range(grid: Grid, seed: int) -> None:
    weight = random_weight(seed)
    importance = torch.rand(24, generator=torch.Generator().manual_seed(seed + 1))
    searched = weighted_error(weight, search_qparams(weight, importance, grid), importance, grid)
    plain = weighted_error(weight, choose_qparams(weight, grid), importance, grid)
    assert bool((searched <= plain * (1 + 1e-5) + 1e-12).all())


def test_a_positive_extreme_is_reached_with_a_negative_scale() -> None:
    weight = torch.tensor([[8.0, -6.0, 3.0, 1.0]])
    grid = Grid(4, 4, True)
    qparams = search_qparams(weight, torch.ones(4), grid)
    assert qparams.scale.tolist() == [[-1.0]]
    assert quantize(weight, qparams, grid).dequantize().tolist() == weight.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_hold_only_values_of_the_stored_type(dtype: torch.dtype) -> None:
    grid = Grid(4, 8, True, dtype)
    scale = search_qparams(random_weight(3), torch.ones(24), grid).scale
    assert torch.equal(scale, scale.to(dtype).float())


def test_values_beyond_half_precision_do_not_become_infinite() -> None:
    weight = torch.full((1, 8), 6e5)
    quantized = quantize(
        weight, choose_qparams(weight, Grid(4, 8, True, torch.float16)), Grid(4, 8, True, torch.float16)
    )
    assert bool(torch.isfinite(quantized.dequantize()).all())
