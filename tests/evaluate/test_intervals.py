"""Bounds and tests against published or hand-computed values, and laws that any bound must obey."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsmith.evaluate.intervals import (
    Estimate,
    MeanEstimate,
    PairedLoss,
    ShareEstimate,
    StratifiedLoss,
    exp_estimate,
    mcnemar_exact,
    mean_estimate,
    samples_to_decide,
)


def test_mean_has_the_textbook_interval() -> None:
    # n = 5, mean 3, sd sqrt(2.5); t(0.95, 4) = 2.131847
    estimate = mean_estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    reach = 2.1318467863 * math.sqrt(2.5 / 5)
    assert estimate.bounds(0.95) == pytest.approx((3 - reach, 3 + reach), rel=1e-9)


@pytest.mark.parametrize(
    ("lost", "gained", "lower", "upper"),
    [(0, 0, -0.027, 0.027), (9, 2, 0.024, 0.20), (18, 0, 0.19, 0.39)],
)
def test_agresti_min_on_60_items(lost: int, gained: int, lower: float, upper: float) -> None:
    assert PairedLoss(60, lost, gained).bounds(0.95) == pytest.approx((lower, upper), abs=0.006)


def test_exact_mcnemar() -> None:
    assert mcnemar_exact(9, 2) == pytest.approx(2 * (1 + 11 + 55) / 2**11)
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3000, 3000) == 1.0
    assert 0 < mcnemar_exact(1200, 800) < 1e-15


def test_no_event_in_a_hundred_is_not_never() -> None:
    lower, upper = ShareEstimate(100, 0).bounds(0.95)
    assert lower == 0.0
    assert upper == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)


def test_ratio_is_bounded_on_the_logarithm() -> None:
    log = MeanEstimate(0.1, 0.02, 40)
    lower, upper = exp_estimate(log).bounds(0.95)
    assert (math.log(lower), math.log(upper)) == pytest.approx(log.bounds(0.95), rel=1e-9)


def test_one_sample_bounds_nothing() -> None:
    assert mean_estimate([1.0]).bounds(0.95) == (-math.inf, math.inf)
    assert samples_to_decide(mean_estimate([1.0]), 2.0, 0.95) is None


def test_stratified_bootstrap_agrees_with_the_normal_theory() -> None:
    strata = (PairedLoss(400, 40, 20), PairedLoss(200, 10, 10))
    estimate = StratifiedLoss(strata)
    variances = [(s.num_lost + s.num_gained - s.num_samples * s.value**2) / s.num_samples**2 for s in strata]
    reach = 1.6449 * math.sqrt(sum(variances)) / 2
    assert estimate.value == pytest.approx(0.025)
    assert estimate.bounds(0.95) == pytest.approx((0.025 - reach, 0.025 + reach), abs=0.002)
    assert estimate.bounds(0.95) == estimate.bounds(0.95), "the seed is fixed"


@pytest.mark.parametrize(("loss", "size"), [(0.01, 300), (0.03, 1000)])
def test_agresti_min_covers_about_as_often_as_it_claims(loss: float, size: int) -> None:
    generator = np.random.default_rng(3)
    counts = generator.multinomial(size, [0.05 + loss / 2, 0.05 - loss / 2, 0.9], size=4000)
    uppers = np.array([PairedLoss(size, lost, gained).bounds(0.95)[1] for lost, gained, _ in counts])
    assert float((uppers < loss).mean()) == pytest.approx(0.05, abs=0.015)


means = st.builds(
    MeanEstimate, st.floats(-5, 5), st.floats(1e-6, 2), st.integers(2, 500), st.sampled_from(["linear"])
)
shares = st.integers(1, 400).flatmap(lambda n: st.builds(ShareEstimate, st.just(n), st.integers(0, n)))
losses = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 400)).map(
    lambda c: PairedLoss(sum(c) or 1, c[0], c[1])
)


@settings(deadline=None)
@given(st.one_of(means, shares), st.floats(0.51, 0.998))
def test_the_value_lies_between_its_bounds(estimate: Estimate, confidence: float) -> None:
    lower, upper = estimate.bounds(confidence)
    assert lower <= estimate.value + 1e-9
    assert estimate.value <= upper + 1e-9


@settings(deadline=None)
@given(st.one_of(means, shares, losses), st.floats(0.6, 0.95))
def test_more_confidence_never_narrows(estimate: Estimate, confidence: float) -> None:
    inner, outer = estimate.bounds(confidence), estimate.bounds(confidence + 0.04)
    assert outer[0] <= inner[0] + 1e-12
    assert inner[1] <= outer[1] + 1e-12


@settings(deadline=None)
@given(st.one_of(means, shares, losses), st.floats(-1, 1))
def test_the_number_of_samples_that_would_decide_does_decide(estimate: Estimate, limit: float) -> None:
    needed = samples_to_decide(estimate, limit, 0.95)
    if needed is not None:
        lower, upper = estimate.resized(needed).bounds(0.95)
        assert not lower <= limit <= upper
        assert needed >= estimate.num_samples
