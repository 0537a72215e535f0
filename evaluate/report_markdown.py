"""report.md: the same report as text, for terminals, pull requests and mail.

Cells are escaped so that a name cannot break the table or become markup.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from bitsmith.core.quality import QualityReport
from bitsmith.evaluate.ladder import LADDER_LEAD, ladder_table
from bitsmith.evaluate.report_text import facts, number, samples_text, task_sections, verdict_text

_SPECIAL = "\\`*_[]|#"


def render_markdown(report: QualityReport) -> str:
    """The whole report."""
    details, provenance = report.details, report.provenance
    lines = [
        f"# {verdict_text(report)}: {_escape(provenance['candidate']['title'])}",
        "",
        f"Computed by: {_escape(provenance['candidate']['name'])}.",
        f"Compared with: {_escape(provenance['baseline']['title'])},"
        f" {_escape(provenance['baseline']['name'])}.",
        "",
    ]
    text = provenance.get("text")
    if text is not None and text["is_fallback"]:
        lines += [f"**The evaluation text is a fallback:** {_escape(text['name'])}.", ""]
    lines += _gate(report)
    if "ladder" in details:
        lines += ["## Ladder of tries", "", LADDER_LEAD, "", *_table(*ladder_table(details["ladder"]))]
    lines += ["## Metrics", ""]
    header = ("metric", "name in a gate", "value", "standard error", "samples")
    rows = [_metric_row(entry) for entry in details["measurements"]]
    rows += [
        (details["known_metrics"][name], name, "not measured", why, "")
        for name, why in details["not_measured"].items()
    ]
    lines += _table(header, rows)
    for section in task_sections(report):
        lines += [f"## {_escape(section['title'])}", "", _escape(section["summary"]), ""]
        lines += _changed(section["changed"])
    lines += ["## How this was made", "", _escape(provenance["error_bars"]), ""]
    rows = [(f"{group}: {name}", value) for group, body in facts(report) for name, value in body]
    lines += _table(("what", "value"), rows)
    return "\n".join(lines)


def _gate(report: QualityReport) -> list[str]:
    if report.verdict is None:
        return ["No gate was given: the figures stand without a verdict.", ""]
    judgements: Sequence[dict[str, Any]] = report.details["judgements"]
    rows = [
        (
            body["verdict"] if body["blocking"] else f"{body['verdict']} (not blocking)",
            body["metric"],
            body["limit"],
            body["reason"],
            body["threshold_reason"],
        )
        for body in judgements
    ]
    return ["## Gate", "", *_table(("verdict", "metric", "limit", "measured", "why this limit"), rows)]


def _metric_row(entry: dict[str, Any]) -> tuple[str, ...]:
    value = f"{number(entry['value'], entry['name'])} {entry['unit']}".strip()
    stderr = number(entry["stderr"], entry["name"])
    return entry["title"], entry["name"], value, stderr, samples_text(entry)


def _changed(changed: Sequence[dict[str, Any]]) -> list[str]:
    if not changed:
        return []
    keys = ("item", "target", "baseline", "baseline_margin", "candidate", "candidate_margin")
    rows = [tuple(str(row[key]) for key in keys) for row in changed]
    return _table(("item", "right", "baseline", "margin", "candidate", "margin"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [_line(header), _line(["---"] * len(header))]
    return [*lines, *(_line([_escape(cell) for cell in row]) for row in rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: object) -> str:
    """Markdown with the special characters of text made literal; a line break becomes a space."""
    plain = html.escape(" ".join(str(text).split()), quote=False)
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in plain)
