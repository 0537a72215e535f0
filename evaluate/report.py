"""The quality report as an object and as report.json; the other two forms are made from the same object.

`details` of a report holds `measurements` (metrics with their estimates), `not_measured` (metric -> why),
`known_metrics` (name -> title), `suites` (what plots and lists show), once judged `gate` and `judgements`,
and `ladder` where it was found by trying several sizes.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitsmith.core.artifact import read_finished
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import verify_files
from bitsmith.core.quality import QualityReport, RuleOutcome, Verdict
from bitsmith.evaluate.gate import Gate, judge
from bitsmith.evaluate.measurement import Measurement, MetricKind, finite_or_none, measurement_from_json
from bitsmith.evaluate.quick_suite import SuiteResult
from bitsmith.evaluate.report_markdown import render_markdown
from bitsmith.evaluate.report_page import render_page

REPORT_SCHEMA_VERSION = 1


def build_report(
    kinds: Sequence[MetricKind], results: Sequence[SuiteResult], provenance: dict[str, Any]
) -> QualityReport:
    """A report without a verdict. Every known metric is measured or has a reason why it is not."""
    measurements = [m for result in results for m in result.measurements]
    not_measured = {name: why for result in results for name, why in result.not_measured.items()}
    measured = {m.metric.name for m in measurements}
    for kind in kinds:
        if kind.name not in measured:
            not_measured.setdefault(kind.name, "these items do not give it")
    details = {
        "measurements": [m.to_json() for m in measurements],
        "not_measured": not_measured,
        "known_metrics": {kind.name: kind.title for kind in kinds},
        "suites": {k: _finite(v) for result in results for k, v in result.details.items()},
    }
    return QualityReport([m.metric for m in measurements], provenance=provenance, details=details)


def _finite(value: Any) -> Any:
    """The same tree with None for every number that JSON cannot write."""
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def measurements_of(report: QualityReport) -> dict[str, Measurement]:
    return {entry["name"]: measurement_from_json(entry) for entry in report.details["measurements"]}


def apply_gate(report: QualityReport, gate: Gate) -> QualityReport:
    """The same measurements, judged."""
    verdict, judgements = judge(gate, measurements_of(report), report.details["not_measured"])
    details = {
        **report.details,
        "gate": gate.to_json(),
        "judgements": [judgement.to_json() for judgement in judgements],
    }
    outcomes = tuple(judgement.outcome() for judgement in judgements)
    return dataclasses.replace(report, verdict=verdict, outcomes=outcomes, details=details)


def write_report_files(directory: Path, report: QualityReport) -> None:
    """report.json, report.md and report.html."""
    text = json.dumps(report_to_json(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (directory / "report.json").write_text(text, encoding="utf-8")
    (directory / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (directory / "report.html").write_text(render_page(report), encoding="utf-8")


def report_to_json(report: QualityReport) -> dict[str, Any]:
    details = dict(report.details)
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "verdict": None if report.verdict is None else str(report.verdict),
        "outcomes": [
            {**dataclasses.asdict(outcome), "verdict": str(outcome.verdict)} for outcome in report.outcomes
        ],
        "metrics": details.pop("measurements"),
        "provenance": dict(report.provenance),
        **details,
    }


def report_from_json(body: dict[str, Any]) -> QualityReport:
    """Raises Refused for another schema version or a missing part."""
    version = body.get("schema_version")
    if version != REPORT_SCHEMA_VERSION:
        raise Refused(
            f"The report has schema version {version!r}; this release reads {REPORT_SCHEMA_VERSION}."
        )
    try:
        details = {key: body[key] for key in ("not_measured", "known_metrics", "suites")}
        details |= {key: body[key] for key in ("gate", "judgements", "ladder") if key in body}
        details["measurements"] = body["metrics"]
        outcomes = tuple(RuleOutcome(**{**o, "verdict": Verdict(o["verdict"])}) for o in body["outcomes"])
        verdict = None if body["verdict"] is None else Verdict(body["verdict"])
        metrics = [measurement_from_json(entry).metric for entry in body["metrics"]]
        return QualityReport(metrics, verdict, outcomes, body["provenance"], details)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"The report cannot be read ({error!r}). Evaluate again.") from error


def read_report(directory: Path) -> QualityReport:
    """A finished report, its files verified against the manifest first."""
    verify_files(directory, read_finished(directory, "quality-report"))
    body: dict[str, Any] = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    return report_from_json(body)
