"""`bitsmith run`: the whole chain from one recipe; finished stages are not redone."""

import argparse
from dataclasses import asdict
from pathlib import Path

from bitsmith.core.progress import Reporter
from bitsmith.core.recipe import load_recipe
from bitsmith.pipeline.chain import plan_chain, run_chain
from bitsmith.pipeline.chain_summary import ChainSummary, summary_table
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.serve_check import QUESTION
from bitsmith.pipeline.verdict_lines import say_outcomes, verdict_exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", type=Path, help="see examples/")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="results go to DIR/NAME (default runs)"
    )
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    recipe = load_recipe(args.recipe)
    plan = plan_chain(recipe, args.runs / recipe.name, reporter, accept_terms=args.accept_terms)
    summary, report = run_chain(plan, reporter)
    say_outcomes(report, reporter)
    _say_summary(summary, reporter)
    document = asdict(summary)
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
