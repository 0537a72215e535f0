"""The quality gate: rules over metrics, and the verdict.

A rule holds when the confidence bound lies inside its limit, fails when the opposite bound lies outside,
and is INCONCLUSIVE in between. What was not measured, or is no finite number, fails. Knows nothing of
files (`gate_file`) or of how anything was measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitsmith.core.quality import RuleOutcome, Verdict
from bitsmith.evaluate.intervals import PairedLoss, mcnemar_exact, samples_to_decide
from bitsmith.evaluate.measurement import Measurement, finite_or_none

DEFAULT_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class GateRule:
    """Limits on one metric; at least one of `maximum` and `minimum` is given."""

    metric: str
    maximum: float | None
    minimum: float | None
    confidence: float = DEFAULT_CONFIDENCE
    blocking: bool = True
    reason: str = ""  # why this threshold: free text, shown beside it

    @property
    def limit(self) -> str:
        limits = [("≤", self.maximum), ("≥", self.minimum)]
        return " and ".join(f"{sign} {value:g}" for sign, value in limits if value is not None)


@dataclass(frozen=True, slots=True)
class Gate:
    """Rules in the order of the file; `source` names that file."""

    rules: tuple[GateRule, ...]
    source: str

    def to_json(self) -> dict[str, Any]:
        rules = {
            rule.metric: {
                key: value
                for key, value in (
                    ("max", rule.maximum),
                    ("min", rule.minimum),
                    ("confidence", rule.confidence),
                    ("blocking", rule.blocking),
                    ("reason", rule.reason),
                )
                if value not in (None, "")
            }
            for rule in self.rules
        }
        return {"source": self.source, "rules": rules}


@dataclass(frozen=True, slots=True)
class Judgement:
    """One rule applied, with the numbers behind the sentence. None: not measured or not estimable."""

    rule: GateRule
    verdict: Verdict
    reason: str
    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    num_samples_needed: int | None = None

    def outcome(self) -> RuleOutcome:
        return RuleOutcome(self.rule.metric, self.rule.limit, self.verdict, self.rule.blocking, self.reason)

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.rule.metric,
            "max": self.rule.maximum,
            "min": self.rule.minimum,
            "limit": self.rule.limit,
            "confidence": self.rule.confidence,
            "blocking": self.rule.blocking,
            "threshold_reason": self.rule.reason,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "value": self.value,
            "lower": self.lower,
            "upper": self.upper,
            "num_samples_needed": self.num_samples_needed,
        }


def judge(
    gate: Gate, measurements: Mapping[str, Measurement], not_measured: Mapping[str, str]
) -> tuple[Verdict, list[Judgement]]:
    """(overall verdict, one judgement for each rule). not_measured: metric -> why."""
    judgements = [_judge_rule(rule, measurements, not_measured) for rule in gate.rules]
    return overall_verdict(judgements), judgements


def overall_verdict(judgements: Sequence[Judgement]) -> Verdict:
    """The worst blocking verdict. A gate without a blocking rule decides nothing, so it does not pass."""
    blocking = [judgement.verdict for judgement in judgements if judgement.rule.blocking]
    if not blocking or Verdict.FAIL in blocking:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if Verdict.INCONCLUSIVE in blocking else Verdict.PASS


def _judge_rule(
    rule: GateRule, measurements: Mapping[str, Measurement], not_measured: Mapping[str, str]
) -> Judgement:
    measurement = measurements.get(rule.metric)
    if measurement is None:
        why = not_measured.get(rule.metric, "it is not part of this report")
        return Judgement(rule, Verdict.FAIL, f"Not measured: {why}.")
    value = measurement.metric.value
    if not math.isfinite(value):
        return Judgement(rule, Verdict.FAIL, "Measured, but not a finite number.")
    lower, upper = measurement.estimate.bounds(rule.confidence)
    verdict = _compare(rule, lower, upper)
    needed = _samples_needed(rule, measurement) if verdict is Verdict.INCONCLUSIVE else None
    reason = _sentence(rule, measurement, (lower, upper), verdict, needed)
    return Judgement(rule, verdict, reason, value, finite_or_none(lower), finite_or_none(upper), needed)


def _compare(rule: GateRule, lower: float, upper: float) -> Verdict:
    is_above = rule.maximum is not None and lower > rule.maximum
    is_below = rule.minimum is not None and upper < rule.minimum
    if is_above or is_below:
        return Verdict.FAIL
    holds_maximum = rule.maximum is None or upper <= rule.maximum
    holds_minimum = rule.minimum is None or lower >= rule.minimum
    return Verdict.PASS if holds_maximum and holds_minimum else Verdict.INCONCLUSIVE


def _samples_needed(rule: GateRule, measurement: Measurement) -> int | None:
    """Samples that would settle every limit of the rule, were the measured value to stay."""
    limits = [limit for limit in (rule.maximum, rule.minimum) if limit is not None]
    needed = [samples_to_decide(measurement.estimate, limit, rule.confidence) for limit in limits]
    known = [count for count in needed if count is not None]
    return max(known) if len(known) == len(needed) else None


def _sentence(
    rule: GateRule,
    measurement: Measurement,
    bounds: tuple[float, float],
    verdict: Verdict,
    num_needed: int | None,
) -> str:
    lower, upper = bounds
    value, num_samples = measurement.metric.value, measurement.metric.num_samples
    sample = measurement.sample + "s"
    percent = f"{rule.confidence * 100:g} % confidence each way"
    if math.isinf(lower) or math.isinf(upper):
        return f"{value:.4g}; from {num_samples} {sample} no error can be estimated: two at least are needed."
    text = f"{value:.4g}, between {lower:.4g} and {upper:.4g} ({percent}, {num_samples} {sample})"
    text += _counts(rule, measurement)
    if verdict is not Verdict.INCONCLUSIVE:
        return f"{text}."
    if num_needed is None:
        return f"{text}. The limit is so near the value that no reachable number of {sample} would decide."
    return f"{text}. About {num_needed} {sample} would decide, were the value to stay."


def _counts(rule: GateRule, measurement: Measurement) -> str:
    """The discordant counts of a paired loss, and the integer budget that a share allows."""
    parts = []
    estimate = measurement.estimate
    if isinstance(estimate, PairedLoss):
        lost, gained = int(estimate.num_lost), int(estimate.num_gained)
        parts.append(f"{lost} lost, {gained} gained, exact McNemar p = {mcnemar_exact(lost, gained):.2g}")
    if measurement.num_counted is not None and measurement.num_counted > 0:
        total = measurement.num_counted
        if rule.maximum is not None:
            parts.append(f"the limit stands for {math.floor(rule.maximum * total + 1e-9)} of {total}")
        if rule.minimum is not None:
            misses = math.floor((1 - rule.minimum) * total + 1e-9)
            parts.append(f"the limit allows {misses} misses in {total}")
    return "; " + "; ".join(parts) if parts else ""
