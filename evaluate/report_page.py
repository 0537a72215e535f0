"""report.html: one self-contained page. Every text is escaped; the page may load nothing and run nothing.

Knows how the report looks, not how anything was measured.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bitsmith.core.quality import QualityReport
from bitsmith.evaluate.ladder import LADDER_LEAD, ladder_table
from bitsmith.evaluate.measurement import measurement_from_json
from bitsmith.evaluate.plots import interval_strip, kl_histogram, position_profile, window_differences
from bitsmith.evaluate.report_text import facts, limit_text, number, samples_text, task_sections, verdict_text

# Beside this file, not through importlib.resources: that cannot read an editable namespace package.
_TEMPLATE = Path(__file__).with_name("report_page.html")
_STYLE = Path(__file__).with_name("report_page.css")
_BAND_CONFIDENCE = 0.95


def render_page(report: QualityReport) -> str:
    """The page's HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    style = _STYLE.read_text(encoding="utf-8")
    details, suites = report.details, report.details["suites"]
    tokens = suites.get("tokens")
    entries = {entry["name"]: entry for entry in details["measurements"]}
    return template.render(
        style=Markup(style),  # noqa: S704 - our own file, and <style> takes no escapes
        badge=verdict_text(report),
        badge_class="none" if report.verdict is None else str(report.verdict).lower(),
        candidate=report.provenance["candidate"],
        baseline=report.provenance["baseline"],
        text=report.provenance.get("text"),
        version=report.provenance["versions"]["bitsmith"],
        error_bars=report.provenance["error_bars"],
        cards=_cards(entries),
        gate_source=details.get("gate", {}).get("source"),
        judgements=[_judgement(body, report) for body in details.get("judgements", [])],
        ladder_lead=LADDER_LEAD,
        ladder=ladder_table(details["ladder"]) if "ladder" in details else None,
        plots=None if tokens is None else _plots(tokens, entries),
        percentiles=[] if tokens is None else _percentiles(tokens),
        metrics=[_metric_row(entry) for entry in entries.values()],
        not_measured=[
            {"name": name, "title": details["known_metrics"][name], "why": why}
            for name, why in details["not_measured"].items()
        ],
        tasks=list(task_sections(report)),
        facts=facts(report),
    )


def _cards(entries: Mapping[str, Any]) -> list[dict[str, str]]:
    """The few figures that are read first; only those that were measured."""
    cards = []
    if "perplexity_ratio" in entries:
        before, after = entries["baseline_perplexity"]["value"], entries["perplexity"]["value"]
        note = f"× {number(entries['perplexity_ratio']['value'])} of the baseline"
        cards.append({"name": "Perplexity", "value": f"{number(before)} → {number(after)}", "note": note})
    for name, note in (("kl_mean", "nats per token"), ("top1_agreement", "same most likely token")):
        if name in entries:
            title = {"kl_mean": "KL divergence, mean", "top1_agreement": "Top-1 agreement"}[name]
            cards.append({"name": title, "value": number(entries[name]["value"], name), "note": note})
    for name in ("cloze_accuracy", "tasks_loss"):
        if name in entries:
            entry = entries[name]
            before = entries.get(f"baseline_{name}")
            note = f"baseline {number(before['value'], name)}" if before else samples_text(entry)
            cards.append({"name": entry["title"], "value": number(entry["value"], name), "note": note})
    return cards


def _judgement(body: Mapping[str, Any], report: QualityReport) -> dict[str, Any]:
    """One row of the gate table. What was not measured has a colour of its own, though it counts as FAIL."""
    is_measured = body["value"] is not None or body["metric"] not in report.details["not_measured"]
    return {
        **body,
        "title": report.details["known_metrics"].get(body["metric"], body["metric"]),
        "limit_text": limit_text(body),
        "value_text": number(body["value"], body["metric"]),
        "picture": Markup(interval_strip(body)),  # noqa: S704 - `svg` escapes every text
        "css": str(body["verdict"]).lower() if is_measured else "none",
        "verdict_text": body["verdict"] if is_measured else f"{body['verdict']}: not measured",
    }


def _plots(tokens: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Markup]:
    difference = measurement_from_json(entries["ln_perplexity_difference"])
    bounds = difference.estimate.bounds(_BAND_CONFIDENCE)
    histogram = tokens["kl_histogram"]
    drawn = {
        "windows": window_differences(tokens["ln_ppl_difference_by_window"], difference.metric.value, bounds),
        "histogram": kl_histogram(histogram["log10_edges"], histogram["counts"], tokens["kl_percentiles"]),
        "positions": position_profile(tokens["by_position"]),
    }
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - `svg` escapes every text


def _percentiles(tokens: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {"50": "median", "100": "max"}
    return [(names.get(key, f"{key} %"), f"{value:.3g}") for key, value in tokens["kl_percentiles"].items()]


def _metric_row(entry: Mapping[str, Any]) -> dict[str, str]:
    return {
        "title": entry["title"],
        "name": entry["name"],
        "value": number(entry["value"], entry["name"]),
        "unit": entry["unit"],
        "stderr": number(entry["stderr"], entry["name"]),
        "samples": samples_text(entry),
        "better": "higher" if entry["higher_is_better"] else "lower",
    }
