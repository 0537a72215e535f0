"""Words and numbers that the Markdown report and the HTML page share: how a figure is written for people.

Knows nothing of markup.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from bitsmith.core.quality import QualityReport

_PERCENTS = ("top1_agreement", "mean_delta_p", "rms_delta_p")
_PERCENT_ENDINGS = ("_accuracy", "_acc", "_acc_norm", "_loss", "_flips", "_exact_match")


def is_percentage(name: str) -> bool:
    return name in _PERCENTS or name.endswith(_PERCENT_ENDINGS)


def number(value: float | None, name: str = "") -> str:
    """A value as it is read: shares in per cent, the rest to four digits; a dash for none."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if is_percentage(name):
        is_tiny = 0 < abs(value) < 5e-5  # would be written 0.00 %
        return f"{value * 100:.1e} %" if is_tiny else f"{value * 100:.2f} %"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def limit_text(judgement: Mapping[str, Any]) -> str:
    """The limits of a rule, written like the value they are compared with."""
    limits = (("≤", judgement["max"]), ("≥", judgement["min"]))
    name = judgement["metric"]
    return " and ".join(f"{sign} {limit_number(value, name)}" for sign, value in limits if value is not None)


def limit_number(value: float, name: str) -> str:
    return f"{value * 100:g} %" if is_percentage(name) else f"{value:g}"


def verdict_text(report: QualityReport) -> str:
    return "NO GATE" if report.verdict is None else str(report.verdict)


def samples_text(entry: Mapping[str, Any]) -> str:
    return f"{entry['num_samples']} {entry['sample']}s"


def changed_rows(changed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Changed answers with their margins written out."""
    margins = ("baseline_margin", "candidate_margin")
    return [row | {key: number(row[key]) for key in margins} for row in changed]


def task_sections(report: QualityReport) -> Iterator[dict[str, Any]]:
    """Title, one sentence and changed answers of the cloze task and of every lm-eval task."""
    suites = report.details["suites"]
    if "cloze" in suites:
        cloze = suites["cloze"]
        summary = (
            f"{cloze['num_items']} passages of the evaluation text without their last word; which of four "
            f"words of like frequency ends it? {len(cloze['changed'])} answers changed, right or wrong. "
            "A margin is the log-likelihood of the chosen word less that of the next, in nats."
        )
        yield {"title": "Cloze task", "summary": summary, "changed": changed_rows(cloze["changed"])}
    notes = suites.get("task_notes")
    for task in suites.get("tasks", []):
        yield {
            "title": task["task"],
            "summary": _task_summary(task),
            "changed": changed_rows(task["changed"]),
        }
    if notes is not None:
        yield {"title": "Answers that scores do not show", "summary": _notes_text(notes), "changed": []}


def _task_summary(task: Mapping[str, Any]) -> str:
    text = (
        f"lm-eval task of type {task['output_type']}, {task['num_items']} items, {task['num_shots']}-shot. "
        f"{task['num_changed']} answers changed, right or wrong."
    )
    difference = task["logprob_difference"]
    if difference is not None:
        text += (
            f" Log-likelihoods differ by {number(difference['mean'])} nats on average, "
            f"{number(difference['p99'])} at the 99th percentile, {number(difference['max'])} at most, "
            f"over {difference['num_logprobs']} scored continuations."
        )
    for role, figures in task["aggregates"].items():
        listed = ", ".join(f"{name} {number(value)}" for name, value in figures.items())
        text += f" lm-eval's own figures, {role}: {listed}."
    return text


def _notes_text(notes: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [
        f"{role}: {note['num_cut_off']} generations cut off at their token limit, {note['num_empty']} empty, "
        f"{note['num_truncated']} prompts shortened from the left, first prompt's ids {note['first_prompt']}"
        for role, note in notes.items()
    ]
    return "; ".join(parts) + "."


def facts(report: QualityReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """Everything of the provenance in reading order: groups of (name, text)."""
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for key in ("candidate", "baseline", "text", "windows", "first_prompt", "tasks", "versions"):
        body = report.provenance.get(key)
        if body is not None:
            groups.append((_spaced(key).capitalize(), [(_spaced(k), _plain(v)) for k, v in body.items()]))
    noise = report.details["suites"].get("repeat_noise")
    if noise is not None:
        rows = [(role, f"{number(noise[role])} nats/token") for role in ("baseline", "candidate")]
        groups.append(("One window alone against the same window in a batch: mean KL", rows))
    return groups


def _spaced(key: str) -> str:
    """A key as words: `num_scored_tokens` is read `scored tokens`."""
    return key.removeprefix("num_").removeprefix("is_").replace("_", " ")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {entry}" for name, entry in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
