"""`bitsmith evaluate`: measure a candidate against a baseline, and let a gate decide."""

import argparse
from pathlib import Path

from bitsmith.core.artifact import find_finished
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import source_digest
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import QualityReport
from bitsmith.core.text_source import load_text
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.evaluate.job import EvaluateJob, EvaluatePlan, artifact_spec, evaluate_quality, plan_evaluate
from bitsmith.evaluate.quick_suite import QuickSettings
from bitsmith.evaluate.report import read_report
from bitsmith.evaluate.task_files import TaskSettings
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.contenders import (
    ContenderSource,
    find_contender,
    open_contender,
    tokenizer_directory,
)
from bitsmith.pipeline.verdict_lines import report_document, say_verdict, verdict_exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    quick = QuickSettings()
    parser.add_argument("candidate", metavar="CANDIDATE", help="an engine, a quantized checkpoint or a model")
    parser.add_argument("--baseline", required=True, metavar="MODEL", help="what it is held against")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the report goes")
    parser.add_argument("--gate", type=Path, metavar="FILE", help="YAML file of rules; without: no verdict")
    parser.add_argument(
        "--suite", choices=["quick", "none"], default="quick",
        help="quick: perplexity, KL, top-1 agreement and the cloze task; none: only --tasks",
    )  # fmt: skip
    parser.add_argument(
        "--text", default="builtin", metavar="SOURCE",
        help="text for the quick suite: builtin (a fallback), FILE.jsonl, FILE.txt, hf:DATASET",
    )  # fmt: skip
    parser.add_argument("--num-windows", type=int, default=quick.num_windows, help="default %(default)s")
    parser.add_argument("--seq-len", type=int, default=quick.seq_len, help="tokens a window (%(default)s)")
    parser.add_argument("--num-cloze-items", type=int, default=quick.num_cloze_items, help="%(default)s")
    parser.add_argument("--seed", type=int, default=quick.seed, help="chooses windows and passages")
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK",
        help="lm-evaluation-harness tasks: names, or paths of YAML files",
    )  # fmt: skip
    parser.add_argument(
        "--include-path", nargs="+", type=Path, default=[], metavar="DIR", help="more task files"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items of each task")
    parser.add_argument(
        "--allow-task-code", action="store_true", help="let task files run the Python functions they name"
    )
    parser.add_argument("--chat-template", action="store_true", help="ask tasks through the chat template")
    parser.add_argument("--trust-engine", action="store_true", help="load an engine that was not built here")
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    candidate = find_contender(args.candidate, reporter, accept_terms=args.accept_terms)
    baseline = find_contender(args.baseline, reporter, accept_terms=args.accept_terms)
    job = _job(args)
    text = load_text(args.text, "evaluation") if job.quick is not None else None
    plan = plan_evaluate(job, load_tokenizer(tokenizer_directory(baseline.path)), text)
    report = finished_or_evaluated(plan, candidate, baseline, reporter, trust_engine=args.trust_engine)
    say_verdict(report, reporter)
    reporter.say(f"report: {args.out / 'report.html'}")
    return CommandResult(report_document(report, args.out), verdict_exit_code(report.verdict))


def finished_or_evaluated(
    plan: EvaluatePlan,
    candidate: ContenderSource,
    baseline: ContenderSource,
    reporter: Reporter,
    *,
    trust_engine: bool = False,
) -> QualityReport:
    """The report at the plan's path if it was made from the same things, else a new one."""
    out = plan.job.out
    spec = artifact_spec(plan, source_digest(candidate.path), source_digest(baseline.path))
    if find_finished(out, spec.stage_key) is not None:
        reporter.say(f"evaluate: {out} is finished already; nothing redone")
        return read_report(out)
    generates = any(task.output_type == "generate_until" for task in plan.outlines)
    contenders = [
        open_contender(source, generates=generates, trust_engine=trust_engine)
        for source in (candidate, baseline)
    ]
    report = evaluate_quality(plan, contenders[0], contenders[1], reporter)
    reporter.say(f"evaluate: wrote {out}")
    return report


def _job(args: argparse.Namespace) -> EvaluateJob:
    for_tasks = {
        "--limit": args.limit is not None,
        "--include-path": bool(args.include_path),
        "--allow-task-code": args.allow_task_code,
        "--chat-template": args.chat_template,
    }
    given = [option for option, is_given in for_tasks.items() if is_given]
    if given and not args.tasks:
        raise Refused(f"{', '.join(given)} applies to --tasks, and no task was given.")
    quick = QuickSettings(args.num_windows, args.seq_len, args.num_cloze_items, args.seed)
    tasks = TaskSettings(
        tasks=tuple(args.tasks),
        include_paths=tuple(args.include_path),
        limit=args.limit,
        allow_task_code=args.allow_task_code,
        use_chat_template=args.chat_template,
    )
    return EvaluateJob(
        out=args.out,
        quick=quick if args.suite == "quick" else None,
        tasks=tasks if args.tasks else None,
        gate=args.gate,
    )
