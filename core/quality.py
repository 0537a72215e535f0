"""The nouns of a quality report: metrics with their uncertainty, rules, verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    PASS = "PASS"  # noqa: S105 - not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured value. stderr None: exact or not estimable. unit "" for a pure ratio."""

    name: str
    value: float
    stderr: float | None
    num_samples: int
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """One gate rule applied to one metric; `reason` is a sentence for the report."""

    metric: str
    limit: str
    verdict: Verdict
    blocking: bool
    reason: str


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What was measured, and what the gate said of it (verdict None: no gate was given)."""

    metrics: Sequence[Metric]
    verdict: Verdict | None = None
    outcomes: Sequence[RuleOutcome] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
