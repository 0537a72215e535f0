"""The scale search and the clip search of AWQ against brute force, and what they promise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsmith.quantize.awq import AwqFamily, search_clips
from bitsmith.quantize.qparams import Grid, choose_qparams, quantize
from bitsmith.quantize.smoothing import mean_by_row, output_error, search_alpha


def problem(seed: int, rows: int = 24, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, inputs) with a few channels of large magnitude."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    magnitude = torch.exp(1.5 * torch.randn(columns, generator=generator))
    return weight, torch.randn(300, columns, generator=generator) * magnitude


def family(weight: torch.Tensor, inputs: torch.Tensor, grid: Grid) -> AwqFamily:
    hessian, columns = inputs.T @ inputs / len(inputs), weight.shape[1]
    return AwqFamily(weight, hessian, inputs.abs().mean(dim=0), torch.arange(columns), columns, grid)


def literal_error(weight: torch.Tensor, inputs: torch.Tensor, scale: torch.Tensor, grid: Grid) -> float:
    """Equation 4 with the inputs themselves: the mean over tokens."""
    scaled = weight * scale
    rounded = quantize(scaled, choose_qparams(scaled, grid), grid).dequantize()
    lost = (inputs / scale) @ rounded.T - inputs @ weight.T
    return float(lost.double().square().sum() / len(inputs))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_error_is_the_papers_without_running_the_layer(symmetric: bool) -> None:
    weight, inputs = problem(0)
    grid = Grid(4, 16, symmetric)
    awq = family(weight, inputs, grid)
    for alpha in (0.0, 0.3, 1.0):
        scale = awq.scale(alpha)
        assert awq.error(scale) == pytest.approx(literal_error(weight, inputs, scale, grid), rel=1e-4)


def test_scales_follow_the_mean_magnitude_to_the_power_of_alpha() -> None:
    weight, inputs = problem(1)
    awq = family(weight, inputs, Grid(4, 16, True))
    magnitude = inputs.abs().mean(dim=0)
    ratio = awq.scale(0.4) / magnitude.pow(0.4)
    assert torch.allclose(ratio, ratio[0].expand_as(ratio))
    assert torch.equal(awq.scale(0.0), torch.ones(64))
    assert float(awq.scale(0.7).max() * awq.scale(0.7).min()) == pytest.approx(1)


def test_outlier_channels_make_scales_pay() -> None:
    weight, inputs = problem(2)
    awq = family(weight, inputs, Grid(4, 16, True))
    best = search_alpha(awq, lambda scale: scale)
    assert 0 < best.alpha <= 1
    assert best.error < 0.8 * awq.error(torch.ones(64))


def test_a_search_that_finds_nothing_better_keeps_scales_of_one() -> None:
    weight, inputs = problem(3)
    awq = family(weight, inputs, Grid(4, 16, True))
    # What can be folded may be far from what was wanted; it is judged as it is.
    best = search_alpha(awq, lambda scale: torch.where(torch.arange(64) % 2 == 0, 100.0, 0.01))
    assert best.alpha == 0 and torch.equal(best.scale, torch.ones(64))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([8, 32, 64]), st.booleans())
def test_never_worse_than_plain_rounding(seed: int, group_size: int, symmetric: bool) -> None:
    weight, inputs = problem(seed, rows=6)
    awq = family(weight, inputs, Grid(4, group_size, symmetric))
    assert search_alpha(awq, lambda scale: scale).error <= awq.error(torch.ones(64))


def test_rows_that_feed_several_columns_have_one_scale() -> None:
    weight, inputs = problem(4)
    rows = torch.arange(64) % 16  # as repeated heads do
    hessian, magnitude = inputs.T @ inputs / len(inputs), inputs.abs().mean(dim=0)
    awq = AwqFamily(weight, hessian, magnitude, rows, 16, Grid(4, 16, True))
    expected = magnitude.view(4, 16).mean(dim=0)
    assert torch.allclose(mean_by_row(magnitude, rows, 16), expected)
    scale = awq.scale(0.5)
    assert scale.shape == (16,)
    assert awq.error(scale) == pytest.approx(
        literal_error(weight, inputs, scale[rows], Grid(4, 16, True)), rel=1e-4
    )


def test_channels_that_were_never_seen_keep_finite_scales() -> None:
    weight, inputs = problem(5)
    inputs[:, [0, 33]] = 0
    awq = family(weight, inputs, Grid(4, 16, True))
    for alpha in (0.1, 1.0):
        assert bool(torch.isfinite(awq.scale(alpha)).all()) and bool((awq.scale(alpha) > 0).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_clips_cost_each_group_less_on_its_own_part_of_the_output(symmetric: bool) -> None:
    weight, inputs = problem(6)
    grid = Grid(3 if symmetric else 4, 16, symmetric)
    hessian = inputs.T @ inputs / len(inputs)
    clipped = quantize(weight, search_clips(weight, hessian, grid), grid).dequantize()
    plain = quantize(weight, choose_qparams(weight, grid), grid).dequantize()

    def by_group(real: torch.Tensor) -> torch.Tensor:
        """[out, num_groups], from the inputs themselves."""
        parts = [
            (inputs[:, columns] @ (real - weight)[:, columns].T).square().mean(dim=0)
            for columns in (slice(start, start + 16) for start in range(0, 64, 16))
        ]
        return torch.stack(parts, dim=1)

    before, after = by_group(plain), by_group(clipped)
    assert bool((after <= before * (1 + 1e-4)).all()) and float(after.sum()) < 0.95 * float(before.sum())


def test_the_output_error_is_the_mean_over_tokens() -> None:
    weight, inputs = problem(7)
    found = output_error(weight, inputs.T @ inputs / len(inputs))
    assert found == pytest.approx(float((inputs @ weight.T).square().sum(dim=1).mean()), rel=1e-4)
