"""What a check found: one sentence each, with what to do, and whether it forbids use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    REFUSE = "refuse"
    WARN = "warn"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    code: short stable name for programs. where: file, tensor or configuration field.
    text: a sentence saying what is wrong and what to do.
    """

    severity: Severity
    code: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.where}: {self.text} [{self.code}]"


def refuse(code: str, where: str, text: str) -> Finding:
    return Finding(Severity.REFUSE, code, where, text)


def warn(code: str, where: str, text: str) -> Finding:
    return Finding(Severity.WARN, code, where, text)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings of one check. `against` names the format and the release."""

    path: str
    against: str
    findings: tuple[Finding, ...]

    @property
    def is_accepted(self) -> bool:
        return not any(finding.severity is Severity.REFUSE for finding in self.findings)

    @property
    def refusals(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.REFUSE)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.WARN)

    def codes(self) -> frozenset[str]:
        return frozenset(finding.code for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        findings = [
            {"severity": f.severity.value, "code": f.code, "where": f.where, "text": f.text}
            for f in self.findings
        ]
        return {
            "path": self.path,
            "against": self.against,
            "accepted": self.is_accepted,
            "findings": findings,
        }

    def lines(self) -> list[str]:
        """For a person: the verdict first, refusals before warnings."""
        verdict = "accepted" if self.is_accepted else "refused"
        head = f"{self.path}: {verdict} as {self.against} ({len(self.refusals)} refusals, "
        return [f"{head}{len(self.warnings)} warnings)", *map(str, (*self.refusals, *self.warnings))]


def collapse(findings: Iterable[Finding], limit: int = 4) -> list[Finding]:
    """At most `limit` findings of one code and severity, then one that says how many more there are."""
    by_code: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in findings:
        by_code.setdefault((finding.severity, finding.code), []).append(finding)
    kept: list[Finding] = []
    for (severity, code), group in by_code.items():
        kept.extend(group[:limit])
        if len(group) > limit:
            kept.append(
                Finding(severity, code, _common_place(group), f"and {len(group) - limit} more like these.")
            )
    return kept


def _common_place(group: Sequence[Finding]) -> str:
    files = {finding.where.split(":")[0] for finding in group}
    return files.pop() if len(files) == 1 else "several places"
