"""`bitsmith models`: the named demo models, and fetching one."""

import argparse

from bitsmith.core.demo_models import list_demo_models
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["get"], help="get: fetch the named model")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name from the list")
    parser.add_argument(
        "--accept-terms", action="store_true", help="accept the model's terms of use, where it has any"
    )


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    if args.action is None:
        models = list_demo_models()
        for model in models:
            reporter.say(f"{model.name:16} {model.summary} ({model.license})")
        return CommandResult({"models": [{"name": m.name, "license": m.license} for m in models]})
    if args.name is None:
        raise Refused(f"Name the model to get: {', '.join(m.name for m in list_demo_models())}.")
    source = resolve_model(args.name, reporter=reporter, accept_terms=args.accept_terms)
    reporter.say(f"{source.name}: {source.path}")
    return CommandResult({"name": source.name, "path": str(source.path)})
