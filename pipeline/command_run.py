"""`bitsmith run`: the whole chain from one recipe; finished stages are not redone."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from bitsmith.core.progress import Reporter
from bitsmith.core.quality import QualityReport, Verdict
from bitsmith.core.recipe import load_recipe
from bitsmith.evaluate.ladder import ladder_table
from bitsmith.pipeline.chain import ChainPlan, plan_chain, run_chain
from bitsmith.pipeline.chain_summary import ChainSummary, summary_table
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.serve_check import QUESTION
from bitsmith.pipeline.until_gate import LadderPlan, climb, plan_ladder, publish
from bitsmith.pipeline.verdict_lines import say_outcomes, verdict_exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", type=Path, help="see examples/")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="results go to DIR/NAME (default runs)"
    )
    parser.add_argument(
        "--until-gate",
        type=Path,
        metavar="GATE.yaml",
        help="look for the smallest mixed-precision model that passes this gate: budgets are halved in, each "
        "compiled and judged; the report shows every try",
    )
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    recipe = load_recipe(args.recipe)
    root = args.runs / recipe.name
    if args.until_gate is not None:
        ladder = plan_ladder(recipe, args.until_gate, root, reporter, accept_terms=args.accept_terms)
        return _run_ladder(ladder, reporter)
    return _run_chain(plan_chain(recipe, root, reporter, accept_terms=args.accept_terms), {}, reporter)


def _run_ladder(plan: LadderPlan, reporter: Reporter) -> CommandResult:
    tries, best = climb(plan, reporter)
    chain, report = publish(plan, tries, best, reporter)
    reporter.console.print(_ladder_table(report))
    extra = {"ladder": report.details["ladder"], "bits_budget": None if best is None else best.bits_budget}
    if best is not None:
        return _run_chain(chain, extra, reporter)
    reporter.say("verdict   FAIL: no budget passes the gate, so that nothing is published but the report")
    reporter.say(f"report    {plan.root / 'report' / 'report.html'}")
    document = {"verdict": str(Verdict.FAIL), "report": str(plan.root / "report" / "report.html"), **extra}
    return CommandResult(document, verdict_exit_code(Verdict.FAIL))


def _ladder_table(report: QualityReport) -> Table:
    header, rows = ladder_table(report.details["ladder"])
    table = Table(title=None, show_edge=False, pad_edge=False)
    for name in header:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _run_chain(plan: ChainPlan, extra: Mapping[str, Any], reporter: Reporter) -> CommandResult:
    """extra: what the JSON document has besides."""
    summary, report = run_chain(plan, reporter)
    say_outcomes(report, reporter)
    _say_summary(summary, reporter)
    document = asdict(summary) | dict(extra)
    del document["key"]
    return CommandResult(document, verdict_exit_code(report.verdict))


def _say_summary(summary: ChainSummary, reporter: Reporter) -> None:
    reporter.say("")
    reporter.console.print(summary_table(summary))
    reporter.say("")
    reporter.say(f"baseline  {summary.baseline}")
    reporter.say(f"engine    {summary.engine}")
    reporter.say(f"verdict   {summary.verdict or 'none: the recipe has no gate'}")
    if summary.served:
        reporter.say(f"served    {QUESTION!r} -> {summary.served!r}")
    reporter.say(f"report    {summary.report}")
    reporter.say(f"serve it  {summary.serve_command}")
