"""Exact values of the parity metrics."""

import math

import pytest
import torch

from bitsmith.compile.logit_comparison import LogitComparison


def test_equal_logits() -> None:
    comparison = LogitComparison()
    comparison.add(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), torch.tensor([[1.0, 2.0], [4.0, 3.0]]))
    result = comparison.result()
    assert (result.num_rows, result.max_relative, result.rms, result.kl_mean, result.top1_agreement) == (
        2,
        0,
        0,
        0,
        1,
    )


def test_known_values_over_two_additions() -> None:
    comparison = LogitComparison()
    half = math.log(0.5)
    comparison.add(torch.tensor([[half, half]]), torch.tensor([[math.log(0.25), math.log(0.75)]]))
    comparison.add(torch.tensor([[0.0, -2.0]]), torch.tensor([[0.0, -2.0]]))
    result = comparison.result()
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert result.kl_mean == pytest.approx(kl / 2, rel=1e-5)
    assert result.max_relative == pytest.approx((half - math.log(0.25)) / 2.0, rel=1e-5)
    differences = [math.log(0.25) - half, math.log(0.75) - half, 0.0, 0.0]
    assert result.rms == pytest.approx(math.sqrt(sum(d * d for d in differences) / 4), rel=1e-5)
    assert result.top1_agreement == 0.5


def test_nan_never_looks_like_agreement() -> None:
    comparison = LogitComparison()
    comparison.add(torch.tensor([[1.0, 2.0]]), torch.tensor([[float("nan"), 2.0]]))
    result = comparison.result()
    assert math.isnan(result.kl_mean)
    assert math.isnan(result.rms)
    assert math.isnan(result.max_relative)
