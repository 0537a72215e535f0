"""GPTQ against a literal reference, and what descent and damping promise."""

import itertools

import pytest
import torch

from bitsmith.quantize.descent import descend
from bitsmith.quantize.gptq import column_order, gptq_quantize
from bitsmith.quantize.hessian import DAMPING_LADDER, HessianAccumulator, damped, factorize
from bitsmith.quantize.qparams import Grid, as_quantized_weight, choose_qparams, quantize
from bitsmith.quantize.stage_quantizer import quantize_by_gptq
from bitsmith.quantize.weight import QuantizedWeight


def problem(
    seed: int, rows: int = 24, columns: int = 96, tokens: int = 400
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, Hessian) with correlated inputs of uneven size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    accumulator = HessianAccumulator(columns)
    for batch in torch.split(torch.randn(tokens, columns, generator=generator), 150):
        accumulator.add(batch @ mixing)
    return weight, accumulator.mean()


def loss(weight: torch.Tensor, real: torch.Tensor, hessian: torch.Tensor) -> float:
    error = (weight - real).double()
    return float(((error @ hessian.double()) * error).sum())


def reference_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, order: list[int], group_size: int
) -> torch.Tensor:
    """The method one column at a time, with H^-1 kept explicitly: OBQ's update, equations 2 and 3."""
    remaining, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    values = torch.zeros_like(remaining)
    for column in order:
        column_scale = scale[:, column // group_size].double()
        values[:, column] = (remaining[:, column] / column_scale).round().clamp(-8, 7)
        error = (remaining[:, column] - values[:, column] * column_scale) / inverse[column, column]
        remaining -= error[:, None] * inverse[column][None, :]
        inverse -= inverse[:, column : column + 1] @ inverse[column : column + 1] / inverse[column, column]
    return values


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [8, 32, 96])
def test_blocked_form_equals_the_column_by_column_reference(act_order: bool, group_size: int) -> None:
    weight, hessian = problem(1)
    grid = Grid(4, group_size, True)
    order = column_order(hessian, act_order)
    factor = factorize(hessian[order][:, order])
    assert factor is not None and factor.damping == DAMPING_LADDER[0]
    qparams = choose_qparams(weight, grid)
    expected = reference_gptq(
        weight, damped(hessian, factor.damping), qparams.scale, order.tolist(), group_size
    )
    found = gptq_quantize(weight, factor, order, qparams, grid)
    # A value within rounding error of a tie may fall either way, and what follows it with it.
    assert (found != expected).float().mean() < 0.01


def test_act_order_takes_the_columns_of_largest_curvature_first() -> None:
    hessian = torch.diag(torch.tensor([1.0, 4.0, 4.0, 9.0]))
    assert column_order(hessian, True).tolist() == [3, 1, 2, 0]
    assert column_order(hessian, False).tolist() == [0, 1, 2, 3]


def test_factor_is_the_upper_cholesky_factor_of_the_damped_inverse() -> None:
    _, hessian = problem(2)
    factor = factorize(hessian)
    assert factor is not None
    assert torch.equal(factor.upper, factor.upper.triu())
    product = factor.upper.double().T @ factor.upper.double() @ damped(hessian.double(), factor.damping)
    assert torch.allclose(product, torch.eye(96, dtype=torch.float64), atol=1e-3)


def test_accumulated_hessian_is_the_mean_outer_product() -> None:
    inputs = torch.randn(70, 600, generator=torch.Generator().manual_seed(0))
    accumulator = HessianAccumulator(600)
    for batch in torch.split(inputs, 32):
        accumulator.add(batch)
    expected = inputs.double().T @ inputs.double() / 70
    assert torch.allclose(accumulator.mean().double(), expected, atol=1e-5)
    assert torch.equal(accumulator.mean(), accumulator.mean().T)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_each_step_of_the_method_loses_less(symmetric: bool, num_bits: int) -> None:
    weight, hessian = problem(3)
    grid = Grid(num_bits, 32, symmetric, torch.bfloat16)
    order = column_order(hessian, True)
    factor = factorize(hessian[order][:, order])
    assert factor is not None
    qparams = choose_qparams(weight, grid)
    regular = damped(hessian, factor.damping)
    rounded = loss(weight, quantize(weight, qparams, grid).dequantize(), regular)
    values = gptq_quantize(weight, factor, order, qparams, grid)
    compensated = loss(weight, as_quantized_weight(values, qparams, grid).dequantize(), regular)
    assert compensated < 0.8 * rounded
    losses = [compensated]
    for _ in range(4):
        values, qparams = descend(weight, regular, (values, qparams), grid, 1)
        losses.append(loss(weight, as_quantized_weight(values, qparams, grid).dequantize(), regular))
    assert losses[1] < losses[0]
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(losses))
    assert values.min() >= grid.quant_min and values.max() <= grid.quant_max


def test_a_hessian_of_few_tokens_is_damped_and_stays_finite() -> None:
    weight, _ = problem(4)
    inputs = torch.randn(8, 96, generator=torch.Generator().manual_seed(5))
    hessian = inputs.T @ inputs / 8
    stage = quantize_by_gptq({"m": weight}, hessian, Grid(4, 32, True), act_order=True)
    assert bool(torch.isfinite(stage.weights["m"].dequantize()).all())
    assert stage.records[0].method == "gptq"


def test_more_damping_is_reported() -> None:
    weight, hessian = problem(6)
    shifted = hessian - 0.05 * hessian.diagonal().mean() * torch.eye(96)  # no longer positive definite
    factor = factorize(shifted)
    assert factor is not None and factor.damping > DAMPING_LADDER[0]
    stage = quantize_by_gptq({"a": weight, "b": weight[:8]}, shifted, Grid(4, 32, True), act_order=False)
    assert [f.where for f in stage.fallbacks] == ["a", "b"]
    assert f"damping {factor.damping}" in stage.fallbacks[0].done


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_falls_back_to_rounding(poison: float) -> None:
    weight, hessian = problem(7)
    hessian[3, 5] = hessian[5, 3] = poison
    stage = quantize_by_gptq({"m": weight}, hessian, Grid(4, 32, True), act_order=True)
    assert bool(torch.isfinite(stage.weights["m"].dequantize()).all())
    assert stage.records[0].method == "rtn"
    assert stage.fallbacks[0].done == "round to nearest"


def test_no_inputs_at_all_fall_back_to_rounding() -> None:
    weight, hessian = problem(8)
    stage = quantize_by_gptq({"m": weight}, torch.zeros_like(hessian), Grid(4, 32, True), act_order=True)
    assert stage.records[0].method == "rtn" and stage.records[0].relative_error is None
    assert bool(torch.isfinite(stage.weights["m"].dequantize()).all())


def test_dead_columns_are_rounded_and_disturb_nobody() -> None:
    weight, hessian = problem(9)
    dead = [0, 17, 95]
    hessian[dead] = 0
    hessian[:, dead] = 0
    grid = Grid(4, 32, True)
    stage = quantize_by_gptq({"m": weight}, hessian, grid, act_order=True)
    quantized = stage.weights["m"]
    assert isinstance(quantized, QuantizedWeight)
    nearest = (weight[:, dead] / quantized.scale[:, [0, 0, 2]]).round().clamp(-8, 7)
    assert torch.equal(quantized.values[:, dead].float(), nearest)
    assert not stage.fallbacks


def test_modules_of_one_stage_come_out_as_if_alone() -> None:
    weight, hessian = problem(10)
    grid = Grid(4, 32, True, torch.bfloat16)
    together = quantize_by_gptq({"a": weight[:10], "b": weight[10:]}, hessian, grid, act_order=True).weights
    alone = quantize_by_gptq({"a": weight[:10]}, hessian, grid, act_order=True).weights
    differing = (together["a"].dequantize() != alone["a"].dequantize()).float().mean()
    assert together["b"].dequantize().shape == (14, 96)
    assert differing < 0.01  # matrix products of other shapes round otherwise
