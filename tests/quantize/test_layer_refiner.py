"""Learned rounding: where it starts, what it may change, and that it is kept only where it helps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bitsmith.quantize.layer_refiner import RefineRows, RefineSettings, refine_layer, rows_per_step
from bitsmith.quantize.qparams import Grid
from bitsmith.quantize.rtn import rtn_quantize
from bitsmith.quantize.signround import LearnedRounding
from bitsmith.quantize.weight import QuantizedWeight

GRIDS = [
    Grid(bits, 8, symmetric, dtype)
    for bits in (4, 8)
    for symmetric in (True, False)
    for dtype in (torch.float32, torch.bfloat16)
]


class TwoLinear(nn.Module):
    """Calls like a decoder layer: hidden states in, hidden states out."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)
        for module in (self.first, self.second):
            module.weight.data.copy_(torch.randn(module.weight.shape, generator=generator))
        self.requires_grad_(False)

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        output: Tensor = self.second(torch.tanh(0.2 * self.first(hidden_states)))
        return output


def problem(grid: Grid, seed: int) -> tuple[TwoLinear, dict[str, tuple[Tensor, QuantizedWeight]], RefineRows]:
    """A layer that holds its rounded weights, what to start from, and rows with the real layer's output."""
    generator = torch.Generator().manual_seed(seed)
    layer = TwoLinear(generator)
    inputs = torch.randn(20, 12, 16, generator=generator)
    targets = layer(inputs)
    start = {}
    for name in ("first", "second"):
        weight = layer.get_parameter(f"{name}.weight")
        start[name] = (weight.data.clone(), rtn_quantize(weight.data, grid))
        weight.data.copy_(start[name][1].dequantize())
    return layer, start, RefineRows(inputs, targets, {})


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(GRIDS), st.integers(0, 10_000))
def test_untouched_it_is_what_it_started_from(grid: Grid, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator)
    # Integers far from the weight, as a compensating method leaves them.
    start = rtn_quantize(weight + 0.3 * torch.randn(5, 24, generator=generator), grid)
    learned = LearnedRounding(weight, start)
    assert torch.equal(learned.real(), start.dequantize())
    found = learned.quantized()
    assert torch.equal(found.values, start.values) and torch.equal(found.scale, start.scale)
    assert found.scale.dtype == grid.scale_dtype


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(GRIDS), st.integers(0, 10_000))
def test_steps_stay_on_the_grid_and_within_one_level(grid: Grid, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator)
    start = rtn_quantize(weight, grid)
    learned = LearnedRounding(weight, start)
    for _ in range(30):
        learned.step(torch.randn(5, 24, generator=generator), 1.0)
    found = learned.quantized()
    assert found.values.min() >= grid.quant_min and found.values.max() <= grid.quant_max
    assert (found.values.int() - start.values.int()).abs().max() <= 1
    assert torch.equal(found.dequantize(), learned.real())
    assert bool(torch.isfinite(found.scale.float()).all()) and bool((found.scale != 0).all())


def test_a_step_goes_down_the_gradient() -> None:
    weight = torch.tensor([[7.5, 0.4, 1.6, -0.4]])
    learned = LearnedRounding(weight, rtn_quantize(weight, Grid(4, 4, True)))
    before = learned.real()
    for _ in range(2):
        learned.step(torch.tensor([[0.0, -1.0, 1.0, 1.0]]), 1.0)
    moved = (learned.real() - before).sign().tolist()
    assert moved[0][1:] == [1.0, -1.0, -1.0]


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(GRIDS), st.integers(0, 10_000))
def test_what_is_kept_came_closer_on_rows_not_learned_from(grid: Grid, seed: int) -> None:
    layer, start, rows = problem(grid, seed)
    refined = refine_layer(layer, start, rows, RefineSettings(10, seed), "layer")
    record = refined.record
    assert record.kept is (record.held_out_after < record.held_out_before)
    for name, weight in refined.weights.items():
        assert torch.equal(layer.get_parameter(f"{name}.weight"), weight.dequantize())
        if not record.kept:
            assert torch.equal(weight.values, start[name][1].values)
    held_out = slice(16, 20)
    error = (layer(rows.inputs[held_out]) - rows.targets[held_out]).square().sum()
    loss = float(error / rows.targets[held_out].square().sum())
    assert loss == pytest.approx(min(record.held_out_before, record.held_out_after), rel=1e-4, abs=1e-9)


def test_coarse_rounding_is_improved() -> None:
    layer, start, rows = problem(Grid(4, 8, True), 0)
    record = refine_layer(layer, start, rows, RefineSettings(60, 0), "layer").record
    assert record.kept and record.held_out_after < 0.95 * record.held_out_before
    assert len(record.losses) == 60


def test_a_start_that_is_right_already_stays() -> None:
    layer, start, rows = problem(Grid(4, 8, True), 1)
    exact = RefineRows(rows.inputs, layer(rows.inputs), {})
    refined = refine_layer(layer, start, exact, RefineSettings(5, 0), "layer")
    assert not refined.record.kept and refined.record.held_out_before == 0
    assert all(torch.equal(refined.weights[n].values, start[n][1].values) for n in start)


def test_rows_are_shared_out_from_two_upwards() -> None:
    assert [rows_per_step(n) for n in (2, 3, 5, 8, 128)] == [1, 1, 2, 4, 4]
