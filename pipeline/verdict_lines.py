"""A quality report on the terminal, as JSON, and as an exit code."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from bitsmith.core.errors import EXIT_DONE, EXIT_GATE_FAIL, EXIT_GATE_INCONCLUSIVE
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import QualityReport, Verdict

_EXIT_CODES = {
    None: EXIT_DONE,
    Verdict.PASS: EXIT_DONE,
    Verdict.FAIL: EXIT_GATE_FAIL,
    Verdict.INCONCLUSIVE: EXIT_GATE_INCONCLUSIVE,
}


def verdict_exit_code(verdict: Verdict | None) -> int:
    """0 for PASS and for a report without a gate, 1 for FAIL, 3 for INCONCLUSIVE."""
    return _EXIT_CODES[verdict]


def say_verdict(report: QualityReport, reporter: Reporter) -> None:
    """Every metric in a line, then every rule with its reason, then the verdict."""
    for metric in report.metrics:
        error = "" if metric.stderr is None else f" ± {metric.stderr:.2g}"
        unit = f" {metric.unit}" if metric.unit else ""
        reporter.say(f"{metric.name:28}{metric.value:.5g}{error}{unit} ({metric.num_samples} samples)")
    say_outcomes(report, reporter)
    if report.verdict is not None:
        reporter.say(f"verdict: {report.verdict}")


def say_outcomes(report: QualityReport, reporter: Reporter) -> None:
    """Every rule of the gate, with its reason."""
    for outcome in report.outcomes:
        note = "" if outcome.blocking else " (does not block)"
        reporter.say(f"{outcome.verdict:13}{outcome.metric} {outcome.limit}{note}: {outcome.reason}")


def report_document(report: QualityReport, directory: Path) -> dict[str, Any]:
    """What `--json` prints of a report; a value that is no finite number becomes null."""
    return {
        "verdict": None if report.verdict is None else str(report.verdict),
        "report": str(directory / "report.html"),
        "metrics": {m.name: {"value": _finite(m.value), "stderr": _finite(m.stderr)} for m in report.metrics},
        "outcomes": [dataclasses.asdict(outcome) for outcome in report.outcomes],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
