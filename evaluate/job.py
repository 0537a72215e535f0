"""One evaluation from the settings to the written report, and a new verdict over an old report.

`plan_evaluate` refuses before any model is loaded; `evaluate_quality` measures and writes the artifact.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bitsmith.core.artifact import ArtifactSpec, write_artifact
from bitsmith.core.digest import stage_key
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import QualityReport
from bitsmith.core.text_source import TextSource
from bitsmith.core.versions import result_versions
from bitsmith.evaluate.contender import Contender, check_comparable
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.gate import Gate
from bitsmith.evaluate.gate_file import check_directions, load_gate
from bitsmith.evaluate.harness import load_tasks, sandboxed_templates
from bitsmith.evaluate.measurement import MetricKind
from bitsmith.evaluate.provenance import describe
from bitsmith.evaluate.quick_suite import (
    QUICK_METRICS,
    QuickPlan,
    QuickSettings,
    SuiteResult,
    plan_quick,
    run_quick,
)
from bitsmith.evaluate.report import apply_gate, build_report, read_report, write_report_files
from bitsmith.evaluate.task_files import TaskSelection, TaskSettings, select_tasks
from bitsmith.evaluate.task_scores import TaskOutline, outline
from bitsmith.evaluate.task_suite import run_task_suite, task_metric_kinds

_VERSIONED = ("torch", "transformers", "tokenizers", "lm_eval", "numpy", "scipy")


@dataclass(frozen=True, slots=True)
class EvaluateJob:
    """What to measure, the gate to apply and where to write. At least one of `quick` and `tasks` is given.

    gate: a YAML file, or the mapping from a recipe; None measures without a verdict.
    """

    out: Path
    quick: QuickSettings | None
    tasks: TaskSettings | None = None
    gate: Path | Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EvaluatePlan:
    """A job whose text, tasks and gate were found good. The encoder's ids are given to both models."""

    job: EvaluateJob
    encoder: TextEncoder
    quick: QuickPlan | None
    selection: TaskSelection | None
    outlines: tuple[TaskOutline, ...]
    gate: Gate | None


def plan_evaluate(
    job: EvaluateJob, tokenizer: PreTrainedTokenizerBase, text: TextSource | None
) -> EvaluatePlan:
    """Raises Refused for settings, texts, tasks or gates that would not give what was asked for.

    text: needed by the quick suite, and only by it.
    """
    if job.quick is None and job.tasks is None:
        raise Refused("Nothing to measure: neither the quick suite nor a task was asked for.")
    if (job.quick is None) != (text is None):
        raise Refused("An evaluation text is needed for the quick suite, and used by nothing else.")
    encoder = TextEncoder(tokenizer)
    selection = select_tasks(job.tasks) if job.tasks is not None else None
    outlines = tuple(outline(file) for file in selection.files) if selection else ()
    kinds = metric_kinds(job.quick, outlines)
    gate = None
    if job.gate is not None:
        directions = {kind.name: kind.higher_is_better for kind in kinds}
        gate = load_gate(job.gate, directions)
        check_directions(gate, directions)
    if selection is not None:
        with sandboxed_templates():
            load_tasks(selection)
    quick = None
    if job.quick is not None and text is not None:
        quick = plan_quick(job.quick, encoder, text)
    return EvaluatePlan(job, encoder, quick, selection, outlines, gate)


def metric_kinds(quick: QuickSettings | None, outlines: tuple[TaskOutline, ...]) -> tuple[MetricKind, ...]:
    """Everything that these suites measure: the names that a gate may use."""
    return (*(QUICK_METRICS if quick is not None else ()), *task_metric_kinds(outlines))


def artifact_spec(plan: EvaluatePlan, candidate_digest: str, baseline_digest: str) -> ArtifactSpec:
    """The report's artifact; its stage key tells whether a finished report can be reused."""
    parents = {"candidate": candidate_digest, "baseline": baseline_digest}
    config = _resolved_config(plan)
    versions = result_versions(*_VERSIONED)
    key = stage_key([f"{role} {digest}" for role, digest in parents.items()], config, versions)
    return ArtifactSpec(plan.job.out, "quality-report", key, parents, config, versions)


def evaluate_quality(
    plan: EvaluatePlan, candidate: Contender, baseline: Contender, reporter: Reporter
) -> QualityReport:
    """Measure, judge, and write report.json, report.md and report.html as an artifact."""
    contenders = {"candidate": candidate, "baseline": baseline}
    check_comparable(
        plan.encoder.tokenizer,
        contenders,
        window_len=plan.job.quick.seq_len if plan.job.quick is not None else 0,
        generates=any(task.output_type == "generate_until" for task in plan.outlines),
    )
    spec = artifact_spec(plan, candidate.digest, baseline.digest)
    with write_artifact(spec) as pending:
        results = _run_suites(plan, candidate, baseline, reporter)
        provenance = describe(contenders, plan.quick, plan.selection, spec.versions)
        report = build_report(metric_kinds(plan.job.quick, plan.outlines), results, provenance)
        if plan.gate is not None:
            report = apply_gate(report, plan.gate)
        write_report_files(pending.partial, report)
        pending.details["verdict"] = None if report.verdict is None else str(report.verdict)
    return report


def _run_suites(
    plan: EvaluatePlan, candidate: Contender, baseline: Contender, reporter: Reporter
) -> list[SuiteResult]:
    results = []
    if plan.quick is not None:
        if plan.quick.text.is_fallback:
            reporter.warn(f"The evaluation text is a fallback: {plan.quick.text.name}.")
        results.append(run_quick(plan.quick, baseline.model, candidate.model, reporter))
    if plan.selection is not None:
        players = ((baseline.model, baseline.generator), (candidate.model, candidate.generator))
        results.append(run_task_suite(plan.selection, plan.outlines, plan.encoder, players, reporter))
    return results


def regate(report_dir: Path, gate: Path | Mapping[str, Any]) -> QualityReport:
    """The report in a directory judged by another gate; nothing is measured and nothing is written."""
    report = read_report(report_dir)
    loaded = load_gate(gate, report.details["known_metrics"])
    check_directions(loaded, {metric.name: metric.higher_is_better for metric in report.metrics})
    return apply_gate(report, loaded)


def _resolved_config(plan: EvaluatePlan) -> dict[str, Any]:
    quick: dict[str, Any] | None = None
    if plan.quick is not None:
        quick = {**dataclasses.asdict(plan.quick.settings), "text": plan.quick.text.name}
        quick["data_sha256"] = plan.quick.data_digest
    tasks: dict[str, Any] | None = None
    if plan.selection is not None:
        settings = replace(plan.selection.settings, include_paths=())
        tasks = dataclasses.asdict(settings)
        tasks["tasks"], tasks["include_paths"] = list(settings.tasks), []
        tasks["files_sha256"] = {file.name: file.sha256 for file in plan.selection.files}
    gate = plan.gate.to_json()["rules"] if plan.gate is not None else None
    return {"quick": quick, "tasks": tasks, "gate": gate}
