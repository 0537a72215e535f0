"""`bitsmith profile`: where an engine's time goes, by phase and operator, beside what this machine can do."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bitsmith.compile.engine import Engine, leave_threads_to_operators
from bitsmith.compile.step_work import step_work
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.whole_file import whole_file
from bitsmith.ops.ceilings import Ceilings, machine_ceilings
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.phase_profile import PhaseProfile, profile_phase
from bitsmith.pipeline.profile_measurement import measure_phases
from bitsmith.pipeline.profile_report import above_ceiling, profile_document, profile_lines
from bitsmith.pipeline.profile_workload import Workload, check_workload, plan_phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Workload()
    parser.add_argument("engine", metavar="ENGINE", type=Path, help="a directory that `compile` wrote")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", default=defaults.num_prompt_tokens,
        help="of each request (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", default=defaults.num_new_tokens,
        help="decode steps (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=int, metavar="N", default=defaults.batch_size,
        help="requests at once (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: as the engine was compiled")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, .json or .json.gz")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what --json prints")
    parser.add_argument(
        "--refresh-ceilings", action="store_true", help="measure what this machine can do again"
    )
    parser.add_argument("--trust-engine", action="store_true", help="load an engine that was not built here")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    _check_file("--out", args.out, (".json",))
    _check_file("--trace", args.trace, (".json", ".json.gz"))
    if args.out is not None and args.out == args.trace:
        raise Refused(f"--out and --trace both name {args.out}; give each a file of its own.")
    workload = Workload(args.prompt_tokens, args.new_tokens, args.batch_size)
    engine = Engine.load(args.engine, trust=args.trust_engine, num_threads=args.num_threads)
    check_workload(workload, engine.limits)
    leave_threads_to_operators()
    ceilings = machine_ceilings(refresh=args.refresh_ceilings)
    phases = plan_phases(workload, engine.max_num_tokens, engine.vocab_size)
    engine.allocate_kv_cache(workload.batch_size * workload.num_blocks_each)
    sizes = {name: tensor.nbytes for name, tensor in engine.weights.items()}
    profiles = [
        profile_phase(phase, [step_work(engine.plan, sizes, step) for step in phase.steps], times, ceilings)
        for phase, times in zip(phases, measure_phases(engine, phases, args.trace), strict=True)
    ]
    _say(profiles, args.engine, engine, ceilings, reporter)
    named = {"path": str(args.engine), "arithmetic": engine.arithmetic}
    document = profile_document(named, workload, ceilings, profiles)
    if args.out is not None:
        with whole_file(args.out) as partial:
            partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return CommandResult(document)


def _check_file(option: str, path: Path | None, suffixes: tuple[str, ...]) -> None:
    """Raises Refused for a file that could not be written, before the work."""
    if path is None:
        return
    if not path.name.endswith(suffixes):
        raise Refused(f"{option} {path}: the name must end in {' or '.join(suffixes)}.")
    if not path.parent.is_dir() or path.is_dir():
        raise Refused(f"{option} {path}: it must name a file in a directory that exists.")


def _say(
    profiles: Sequence[PhaseProfile], path: Path, engine: Engine, ceilings: Ceilings, reporter: Reporter
) -> None:
    reporter.say(f"engine   {path}: {engine.arithmetic}")
    reporter.say(f"machine  {ceilings.describe()}")
    for line in profile_lines(profiles):
        reporter.say(line)
    if parts := above_ceiling(profiles):
        reporter.warn(
            f"above the ceilings: {', '.join(parts)}. What they read may fit in the processor's caches; "
            "or something disturbed a measurement: --refresh-ceilings measures the ceilings again."
        )
