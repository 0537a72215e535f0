"""The ladder of tries: which sizes were tried for a gate, and what it said of each.

Not known here: how a try is made. A report holds its ladder as `details["ladder"]`, one entry for each try.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitsmith.core.quality import QualityReport, Verdict
from bitsmith.evaluate.report_text import number

LADDER_LEAD = (
    "Mixed-precision budgets that were tried for this gate, from small to large; the figures are those of "
    "its rules. This report is that of the smallest one that passes or, where none does, of the largest."
)


@dataclass(frozen=True, slots=True)
class LadderTry:
    """bits_budget: what was asked, bits: what it came to, both bits a weight with scales counted.

    checkpoint_bytes, engine_bytes: all files of each. metrics: those that the gate's rules name; None where
    one was not measured. reasons: for each rule that did not pass, the gate's sentence.
    """

    bits_budget: float
    bits: float
    checkpoint_bytes: int
    engine_bytes: int
    verdict: Verdict
    metrics: Mapping[str, float | None]
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "verdict": str(self.verdict), "reasons": list(self.reasons)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "LadderTry":
        return cls(**{**body, "verdict": Verdict(body["verdict"]), "reasons": tuple(body["reasons"])})

    @property
    def passes(self) -> bool:
        return self.verdict is Verdict.PASS


def with_ladder(report: QualityReport, tries: Sequence[LadderTry]) -> QualityReport:
    """The report of one of the tries, with all of them in the order in which they were made."""
    ladder = [made.to_json() for made in tries]
    return dataclasses.replace(report, details={**report.details, "ladder": ladder})


def ladder_table(ladder: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows), from the smallest budget to the largest. ladder: as a report holds it."""
    names = list(dict.fromkeys(name for made in ladder for name in made["metrics"]))
    header = ("bits budget", "bits a weight", "checkpoint", "engine", *names, "verdict")
    rows = [
        (
            f"{made['bits_budget']:g}",
            f"{made['bits']:.3f}",
            f"{made['checkpoint_bytes'] / 1e6:.1f} MB",
            f"{made['engine_bytes'] / 1e6:.1f} MB",
            *(number(made["metrics"].get(name), name) for name in names),
            str(made["verdict"]),
        )
        for made in sorted(ladder, key=lambda made: float(made["bits_budget"]))
    ]
    return header, rows
