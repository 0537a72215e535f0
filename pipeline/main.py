"""The `bitsmith` program: picks the subcommand, turns errors into one sentence and an exit code.

Knows no stage: a command's module is imported only when it is asked for, so `--help` answers at once.
"""

import argparse
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol, cast

from bitsmith.core.errors import EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_WORK_FAILED, BitsmithError
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult

COMMANDS = {
    "models": "list the named demo models, or fetch one",
    "quantize": "quantize a model into a checkpoint that other tools load too",
    "convert": "put a quantized checkpoint into another format, losslessly",
    "compile": "compile a checkpoint into an engine",
    "evaluate": "measure what was lost, and let a gate decide",
    "gate": "decide again over an existing report",
    "serve": "serve an engine over an OpenAI-compatible HTTP interface",
    "generate": "one answer on the terminal",
    "profile": "show where an engine's time goes, by phase and operator",
    "run": "the whole chain from one recipe",
    "inspect": "show what an artifact is, and verify it",
    "doctor": "what this machine can do, and what it lacks",
}


class Command(Protocol):
    """What a module `command_NAME` offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, reporter: Reporter) -> CommandResult: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _bound_spinning()
    try:
        command, parser = _build_parser(arguments)
        args = parser.parse_args(arguments)
    except SystemExit as exit_:  # argparse has said on stderr what is wrong
        if exit_.code == EXIT_REFUSED and "--json" in arguments:
            _print_error("Usage", "The command line is not valid; stderr says why.", EXIT_REFUSED)
        raise
    reporter = Reporter()
    try:
        result = command.run(args, reporter)
    except BitsmithError as error:
        return _fail(args, reporter, type(error).__name__, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail(args, reporter, "Interrupted", _interrupted(args), EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        sys.stderr.close()
        return EXIT_INTERRUPTED
    except Exception as error:  # a fault of ours must not end with 1, which is a gate's verdict
        traceback.print_exc()
        message = f"unexpected {type(error).__name__}: {error}. A fault in bitsmith: please report it."
        return _fail(args, reporter, "Unexpected", message, EXIT_WORK_FAILED)
    if args.json and result.document is not None:
        print(json.dumps(result.document, ensure_ascii=False, allow_nan=False))
    return result.exit_code


def _bound_spinning() -> None:
    """Before torch is imported: let the waits of its OpenMP threads sleep after some 50 µs, not after 4 ms.

    Beside busy neighbours every longer wait burns a time slice (docs/adr/0015). A user's own choice stays.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _build_parser(arguments: Sequence[str]) -> tuple[Command, argparse.ArgumentParser]:
    """The whole parser; only the module of the command that is asked for is imported."""
    parser = argparse.ArgumentParser(
        prog="bitsmith",
        description="Quantize, compile, evaluate and serve causal language models.",
        epilog="Exit codes: 0 done; 1 the gate says FAIL; 2 refused before work began; "
        "3 the gate says INCONCLUSIVE; 4 failed in the work; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"bitsmith {version('bitsmith')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    command: Command | None = None
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if name == asked:
            command = _import_command(name)
            command.add_arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    if command is None:
        parser.parse_args(arguments)  # --help, --version, or an error that lists the commands: never returns
        raise AssertionError(f"argparse accepted a command that is not known: {asked}")
    return command, parser


def _import_command(name: str) -> Command:
    """What an import defines stays for good: searching it for garbage takes a third of a short command."""
    gc.disable()
    try:
        return cast(Command, importlib.import_module(f"bitsmith.pipeline.command_{name}"))
    finally:
        gc.freeze()
        gc.enable()


def _fail(args: argparse.Namespace, reporter: Reporter, kind: str, message: str, exit_code: int) -> int:
    reporter.console.print(f"bitsmith {args.command}: {message}", style="red", markup=False, soft_wrap=True)
    if args.json:
        _print_error(kind, message, exit_code)
    return exit_code


def _interrupted(args: argparse.Namespace) -> str:
    if args.command == "quantize" and args.backend == "bitsmith":
        return "Interrupted. Finished layers are kept; go on with --resume."
    return "Interrupted. Run it again to go on." if args.command == "run" else "Interrupted."


def _print_error(kind: str, message: str, exit_code: int) -> None:
    print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": exit_code}}))


if __name__ == "__main__":
    sys.exit(main())
