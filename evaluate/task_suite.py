"""lm-evaluation-harness tasks run on both models and compared.

Knows nothing of gates, reports or artifacts.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel, TextGenerator
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.harness import HarnessRun, run_tasks
from bitsmith.evaluate.item_level import MACRO_LOSS, macro_loss
from bitsmith.evaluate.lm_eval_model import HarnessModel
from bitsmith.evaluate.measurement import Measurement, MetricKind
from bitsmith.evaluate.quick_suite import SuiteResult
from bitsmith.evaluate.task_comparison import compare_task
from bitsmith.evaluate.task_files import TaskSelection
from bitsmith.evaluate.task_scores import TaskOutline

_Player = tuple[LogitsModel, TextGenerator | None]


def task_metric_kinds(outlines: Sequence[TaskOutline]) -> tuple[MetricKind, ...]:
    kinds = tuple(kind for outline in outlines for kind in outline.metric_kinds())
    return (*kinds, MACRO_LOSS) if len(outlines) > 1 else kinds


def run_task_suite(
    selection: TaskSelection,
    outlines: Sequence[TaskOutline],
    encoder: TextEncoder,
    players: tuple[_Player, _Player],  # baseline, candidate
    reporter: Reporter,
) -> SuiteResult:
    """Both models answer the same requests in the same order, one model after the other."""
    context_len = min(model.max_model_len for model, _ in players)
    baseline, candidate = (
        run_tasks(HarnessModel(model, encoder, context_len, reporter, generator), selection)
        for model, generator in players
    )
    measurements: list[Measurement] = []
    not_measured: dict[str, str] = {}
    details: list[dict[str, Any]] = []
    losses = []
    for outline in outlines:
        comparison = compare_task(outline, baseline, candidate)
        measurements += comparison.measurements
        not_measured |= comparison.not_measured
        details.append(comparison.details)
        losses += _first_loss(outline, comparison.measurements)
    if len(outlines) > 1:
        overall = macro_loss(losses)
        if overall is None:
            not_measured[MACRO_LOSS.name] = "fewer than two tasks gave right/wrong scores that are not void"
        else:
            measurements.append(overall)
    notes = {"baseline": _notes(baseline), "candidate": _notes(candidate)}
    return SuiteResult(measurements, not_measured, {"tasks": details, "task_notes": notes})


def _first_loss(outline: TaskOutline, measurements: Sequence[Measurement]) -> list[Measurement]:
    """One loss per task: that of its first score, the one its file names first."""
    if not outline.scores:
        return []
    name = outline.scores[0].name.kinds()[2].name
    return [m for m in measurements if m.metric.name == name]


def _notes(run: HarnessRun) -> dict[str, Any]:
    notes = asdict(run.notes)
    notes["first_prompt"] = list(run.notes.first_prompt[:16])
    return notes
