"""`bitsmith gate`: another gate over an existing report. Nothing is measured, nothing is written."""

import argparse
from pathlib import Path

from bitsmith.core.progress import Reporter
from bitsmith.evaluate.job import regate
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.verdict_lines import report_document, say_verdict, verdict_exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", metavar="REPORT", type=Path, help="a directory that `evaluate` wrote")
    parser.add_argument("--gate", metavar="FILE", type=Path, required=True, help="YAML file of rules")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    report = regate(args.report, args.gate)
    say_verdict(report, reporter)
    return CommandResult(report_document(report, args.report), verdict_exit_code(report.verdict))
