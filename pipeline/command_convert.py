"""`bitsmith convert`: a quantized checkpoint in another format, losslessly."""

import argparse
from dataclasses import asdict
from pathlib import Path

from bitsmith.core.artifact import find_finished
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.quantize.conversion import ConvertJob, convert_checkpoint, plan_convert
from bitsmith.quantize.packed_format import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="directory or hf:ORG/NAME[@REV] with integer weights: compressed-tensors, GPTQ or AWQ",
    )
    parser.add_argument("--format", required=True, choices=FORMATS, help="the format of the result")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the checkpoint goes")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a GPTQ file whose zero-point label is wrong, or not confirmed by its values",
    )


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    source = resolve_model(args.checkpoint, reporter=reporter, accept_terms=False)
    job = ConvertJob(source, args.format, args.out, args.strict)
    plan = plan_convert(job)
    for note in plan.source.notes:
        reporter.warn(note)
    manifest = find_finished(job.out, plan.stage_key)
    if manifest is None:
        manifest = convert_checkpoint(job, plan)
        reporter.say(
            f"convert: wrote {job.out}, {len(plan.modules)} modules as {job.format}; "
            "their weights equal the source's bit for bit"
        )
    else:
        reporter.say(f"convert: {job.out} is finished already; nothing redone")
    return CommandResult(
        {
            "path": str(job.out),
            "content_digest": manifest.content_digest,
            "config": manifest.config,
            "notes": manifest.details["notes"],
            "fallbacks": [asdict(fallback) for fallback in manifest.fallbacks],
        }
    )
