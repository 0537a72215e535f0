"""SmoothQuant's scales against the paper's formula, and the error that chooses their strength."""

import pytest
import torch

from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.input_range import SAMPLE_TOKENS, InputRange
from bitsmith.quantize.int8_weight import round_inputs
from bitsmith.quantize.smoothing import search_alpha
from bitsmith.quantize.smoothquant import SmoothQuantFamily

REACHES: tuple[ActivationScale, ...] = ("token", "tensor")


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, inputs): three input channels fifty times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(300, 64, generator=generator)
    inputs[:, [3, 17, 40]] *= 50
    return torch.randn(24, 64, generator=generator), inputs


def family(weight: torch.Tensor, inputs: torch.Tensor, reach: ActivationScale) -> SmoothQuantFamily:
    seen = InputRange(64, torch.split(inputs, 100))
    return SmoothQuantFamily(weight, seen, reach, torch.arange(64), 64)


def test_scales_are_the_papers_up_to_a_common_factor() -> None:
    weight, inputs = problem(0)
    found = family(weight, inputs, "token").scale(0.3)
    expected = inputs.abs().amax(dim=0).pow(0.3) / weight.abs().amax(dim=0).pow(0.7)
    ratio = found / expected
    assert torch.allclose(ratio, ratio[0].expand_as(ratio))


@pytest.mark.parametrize("reach", REACHES)
def test_outliers_make_smoothing_pay(reach: ActivationScale) -> None:
    weight, inputs = problem(1)
    smooth = family(weight, inputs, reach)
    best = search_alpha(smooth, lambda scale: scale)
    assert 0 < best.alpha < 1 and best.error < 0.3 * smooth.error(torch.ones(64))


def test_the_error_is_that_of_integer_products() -> None:
    weight, inputs = problem(2)
    smooth = family(weight, inputs, "token")
    scale = smooth.scale(0.5)
    scaled, rows = weight * scale, inputs / scale
    weight_step = scaled.abs().amax(dim=1, keepdim=True) / 127.5
    row_step = rows.abs().amax(dim=1, keepdim=True) / 127
    integers = (rows / row_step).round() @ (scaled / weight_step).round().clamp(-128, 127).T
    lost = integers * row_step * weight_step.T - inputs @ weight.T
    assert smooth.error(scale) == pytest.approx(float(lost.square().sum()), rel=1e-3)


def test_inputs_are_rounded_with_one_scale_or_one_for_each_token() -> None:
    inputs = torch.tensor([[127.0, 1.4, 0.0], [0.0, 0.0, 0.0], [1.27, 0.014, 300.0]])
    by_token = round_inputs(inputs, None)
    assert by_token[0].tolist() == pytest.approx([127.0, 1.0, 0.0])
    assert by_token[1].tolist() == [0, 0, 0]
    static = round_inputs(inputs, 1.0)
    assert static[0].tolist() == [127, 1, 0] and static[2].tolist() == [1, 0, 127]


def test_the_range_sees_every_token_and_keeps_a_bounded_sample() -> None:
    inputs = torch.randn(5000, 8, generator=torch.Generator().manual_seed(3))
    seen = InputRange(8, torch.split(inputs, 200))
    assert torch.equal(seen.amax, inputs.abs().amax(dim=0))
    assert 0 < len(seen.sample) <= SAMPLE_TOKENS and seen.is_usable()
    assert not InputRange(8, []).is_usable()
    assert not InputRange(8, [torch.zeros(4, 8)]).is_usable()
    assert not InputRange(8, [torch.full((4, 8), float("nan"))]).is_usable()
