"""Verdicts: the table of the contract, and that nothing unknown ever passes."""

import math

import pytest

from bitsmith.core.quality import Verdict
from bitsmith.evaluate.gate import Gate, GateRule, judge
from bitsmith.evaluate.intervals import Estimate, MeanEstimate, PairedLoss, ShareEstimate, mean_estimate
from bitsmith.evaluate.measurement import Measurement, MetricKind, measure

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE


def _measured(estimate: Estimate, name: str = "kl_mean") -> dict[str, Measurement]:
    kind = MetricKind(name, name, "", False, "window")
    return {name: measure(kind, estimate, estimate.num_samples)}


def _verdict(rule: GateRule, estimate: Estimate) -> Verdict:
    overall, judgements = judge(Gate((rule,), "test"), _measured(estimate), {})
    assert overall == judgements[0].verdict
    return overall


@pytest.mark.parametrize(
    ("maximum", "minimum", "expected"),
    [
        (0.14, None, PASS),  # bounds are 0.1 ± 0.0337
        (0.12, None, INCONCLUSIVE),
        (0.08, None, INCONCLUSIVE),
        (0.06, None, FAIL),
        (None, 0.06, PASS),
        (None, 0.09, INCONCLUSIVE),
        (None, 0.14, FAIL),
        (0.14, 0.06, PASS),
        (0.14, 0.09, INCONCLUSIVE),
        (0.06, 0.01, FAIL),
    ],
)
def test_verdict_of_one_rule(maximum: float | None, minimum: float | None, expected: Verdict) -> None:
    assert _verdict(GateRule("kl_mean", maximum, minimum), MeanEstimate(0.1, 0.02, 41)) == expected


def test_more_confidence_asks_for_more() -> None:
    estimate = MeanEstimate(0.1, 0.02, 41)
    assert _verdict(GateRule("kl_mean", 0.14, None, confidence=0.95), estimate) == PASS
    assert _verdict(GateRule("kl_mean", 0.14, None, confidence=0.999), estimate) == INCONCLUSIVE


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_fails(value: float) -> None:
    assert _verdict(GateRule("kl_mean", 1e9, None), MeanEstimate(value, 0.1, 40)) == FAIL


def test_what_was_not_measured_fails_and_says_why() -> None:
    gate = Gate((GateRule("cloze_accuracy_loss", 0.1, None),), "test")
    overall, (judgement,) = judge(gate, {}, {"cloze_accuracy_loss": "void, the baseline guesses"})
    assert overall == FAIL
    assert "void, the baseline guesses" in judgement.reason


def test_one_window_cannot_decide() -> None:
    assert _verdict(GateRule("kl_mean", 1e9, None), mean_estimate([0.01])) == INCONCLUSIVE


def test_inconclusive_names_the_number_that_decides() -> None:
    rule = GateRule("kl_mean", 0.11, None)
    _, (judgement,) = judge(Gate((rule,), "test"), _measured(MeanEstimate(0.1, 0.02, 41)), {})
    needed = judgement.num_samples_needed
    assert needed is not None
    # (1.645 · 0.02 / 0.01)² · 41 = 444
    assert needed == pytest.approx(444, rel=0.02)
    assert f"About {needed} windows would decide" in judgement.reason


def test_only_blocking_rules_decide() -> None:
    passing = GateRule("kl_mean", 1.0, None)
    failing = GateRule("kl_mean", 0.01, None, blocking=False)
    measured = _measured(MeanEstimate(0.1, 0.02, 41))
    overall, judgements = judge(Gate((passing, failing), "test"), measured, {})
    assert overall == PASS
    assert [j.verdict for j in judgements] == [PASS, FAIL]
    assert judge(Gate((failing,), "test"), measured, {})[0] == FAIL, "nothing blocks, so nothing passes"


def test_the_worst_blocking_verdict_wins() -> None:
    measured = _measured(MeanEstimate(0.1, 0.02, 41))
    rules = {PASS: 1.0, INCONCLUSIVE: 0.11, FAIL: 0.01}

    def overall(*wanted: Verdict) -> Verdict:
        return judge(Gate(tuple(GateRule("kl_mean", rules[w], None) for w in wanted), "t"), measured, {})[0]

    assert overall(PASS, INCONCLUSIVE) == INCONCLUSIVE
    assert overall(INCONCLUSIVE, FAIL, PASS) == FAIL
    assert overall(PASS, PASS) == PASS


def test_small_but_real_drop_is_found_by_pairing_and_left_open_by_few_items() -> None:
    """At half of 220 items right, an unpaired test of this loss gives p = 0.09."""
    rule = GateRule("accuracy_loss", 0.02, None)
    measured = _measured(PairedLoss(220, 26, 8), "accuracy_loss")
    overall, (judgement,) = judge(Gate((rule,), "test"), measured, {})
    assert overall == FAIL
    assert "26 lost, 8 gained, exact McNemar p = 0.0029" in judgement.reason
    few = _measured(PairedLoss(15, 2, 1), "accuracy_loss")
    assert judge(Gate((rule,), "test"), few, {})[0] == INCONCLUSIVE


def test_shares_state_their_integer_budget() -> None:
    rule = GateRule("top1", None, 0.9)
    _, (judgement,) = judge(Gate((rule,), "test"), _measured(ShareEstimate(10, 10), "top1"), {})
    assert judgement.verdict == INCONCLUSIVE
    assert "the limit allows 1 misses in 10" in judgement.reason
