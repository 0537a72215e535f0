"""A metric together with the estimate from which its bounds can be had at any confidence, and its JSON.

The report keeps estimates, not bounds: that is what lets `bitsmith gate` judge an old report by new rules.
Knows nothing of how anything was measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bitsmith.core.errors import Refused
from bitsmith.core.quality import Metric
from bitsmith.evaluate.intervals import Estimate, MeanEstimate, PairedLoss, ShareEstimate, StratifiedLoss

Sample = Literal["window", "item"]


@dataclass(frozen=True, slots=True)
class MetricKind:
    """What a metric is, before it is measured."""

    name: str
    title: str  # for people
    unit: str
    higher_is_better: bool
    sample: Sample


@dataclass(frozen=True, slots=True)
class Measurement:
    """num_counted: of how many tokens or items a share is a share, None for what is not a share."""

    metric: Metric
    estimate: Estimate
    sample: Sample
    title: str
    num_counted: int | None = None

    def to_json(self) -> dict[str, Any]:
        metric = self.metric
        return {
            "name": metric.name,
            "value": finite_or_none(metric.value),
            "stderr": None if metric.stderr is None else finite_or_none(metric.stderr),
            "num_samples": metric.num_samples,
            "unit": metric.unit,
            "higher_is_better": metric.higher_is_better,
            "sample": self.sample,
            "title": self.title,
            "num_counted": self.num_counted,
            "estimate": _estimate_to_json(self.estimate),
        }


def measure(kind: MetricKind, estimate: Estimate, num_counted: int | None = None) -> Measurement:
    """The measurement of a kind from its estimate."""
    stderr = _stderr(estimate)
    metric = Metric(kind.name, estimate.value, stderr, estimate.num_samples, kind.unit, kind.higher_is_better)
    return Measurement(metric, estimate, kind.sample, kind.title, num_counted)


def measurement_from_json(body: Mapping[str, Any]) -> Measurement:
    """Raises Refused when the entry is not one that `to_json` wrote."""
    try:
        value = math.nan if body["value"] is None else float(body["value"])
        metric = Metric(
            body["name"],
            value,
            body["stderr"],
            body["num_samples"],
            body["unit"],
            body["higher_is_better"],
        )
        estimate = _estimate_from_json(body["estimate"])
        return Measurement(metric, estimate, body["sample"], body["title"], body["num_counted"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"A metric of the report cannot be read ({error!r}). Evaluate again.") from error


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN: a value that is no finite number is written as null and read back as NaN."""
    return value if math.isfinite(value) else None


def _stderr(estimate: Estimate) -> float | None:
    """A standard error to print; bounds do not come from it unless the estimate is a mean."""
    match estimate:
        case MeanEstimate():
            return estimate.stderr
        case ShareEstimate(num_samples):
            return math.sqrt(estimate.value * (1 - estimate.value) / num_samples)
        case PairedLoss(num_samples, num_lost, num_gained):
            spread = num_lost + num_gained - (num_lost - num_gained) ** 2 / num_samples
            return math.sqrt(max(0.0, spread)) / num_samples
        case StratifiedLoss():
            return float(estimate.draws().std())
    raise AssertionError(type(estimate))


def _estimate_to_json(estimate: Estimate) -> dict[str, Any]:
    match estimate:
        case MeanEstimate(value, stderr, num_samples, scale):
            return {
                "kind": "mean",
                "value": finite_or_none(value),
                "stderr": None if stderr is None else finite_or_none(stderr),
                "num_samples": num_samples,
                "scale": scale,
            }
        case ShareEstimate(num_samples, num_true):
            return {"kind": "share", "num_samples": num_samples, "num_true": num_true}
        case PairedLoss(num_samples, num_lost, num_gained):
            counts = {"num_samples": num_samples, "num_lost": num_lost, "num_gained": num_gained}
            return {"kind": "paired", **counts}
        case StratifiedLoss(strata):
            return {"kind": "stratified", "strata": [_estimate_to_json(stratum) for stratum in strata]}
    raise AssertionError(type(estimate))


def _estimate_from_json(body: Mapping[str, Any]) -> Estimate:
    match body["kind"]:
        case "mean":
            value = math.nan if body["value"] is None else float(body["value"])
            return MeanEstimate(value, body["stderr"], body["num_samples"], body["scale"])
        case "share":
            return ShareEstimate(body["num_samples"], body["num_true"])
        case "paired":
            return _paired_from_json(body)
        case "stratified":
            return StratifiedLoss(tuple(_paired_from_json(stratum) for stratum in body["strata"]))
    raise ValueError(f"unknown estimate {body['kind']!r}")


def _paired_from_json(body: Mapping[str, Any]) -> PairedLoss:
    return PairedLoss(body["num_samples"], body["num_lost"], body["num_gained"])
