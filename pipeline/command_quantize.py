"""`bitsmith quantize`: a model becomes a quantized checkpoint."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bitsmith.core.artifact import find_finished
from bitsmith.core.manifest import Manifest
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import (
    DEFAULT_REFINE_STEPS,
    SCHEME_NAMES,
    QuantizationScheme,
    parse_scheme_name,
    resolve_refine_steps,
)
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.scheme_text import describe_scheme
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.job import QuantizeJob, QuantizePlan, plan_quantize, quantize_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory, hf:ORG/NAME[@REV], .gguf file, demo model")
    parser.add_argument("--scheme", required=True, metavar="S", help=f"one of {', '.join(SCHEME_NAMES)}")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the checkpoint goes")
    parser.add_argument(
        "--group-size",
        type=_group_size,
        default="auto",
        metavar="N",
        help="columns per scale: auto (the largest of 128, 64, 32 that divides every module; the default), "
        "a number, or channel (one scale per output channel)",
    )
    grid = parser.add_mutually_exclusive_group()
    grid.add_argument("--symmetric", dest="symmetric", action="store_true", default=True, help="the default")
    grid.add_argument("--asymmetric", dest="symmetric", action="store_false", help="store zero points too")
    parser.add_argument(
        "--act-order",
        action=argparse.BooleanOptionalAction,
        help="GPTQ: columns with the largest inputs first, static groups (the default of GPTQ)",
    )
    parser.add_argument(
        "--kv-cache", choices=["none", "fp8"], default="none", help="calibrate scales for this KV cache"
    )
    parser.add_argument(
        "--refine",
        action="store_true",
        help="then learn rounding and scales, layer by layer, against the unquantized model's outputs",
    )
    parser.add_argument(
        "--refine-steps",
        type=int,
        metavar="N",
        help=f"steps of --refine for each layer (default: {DEFAULT_REFINE_STEPS})",
    )
    defaults = CalibrationSettings()
    parser.add_argument(
        "--calibration",
        default=defaults.source,
        metavar="SOURCE",
        help="builtin (a fallback made from Python's own documentation; the default), FILE.jsonl, FILE.txt, "
        "or hf:DATASET",
    )
    parser.add_argument("--num-samples", type=int, default=defaults.num_samples, help="calibration rows")
    parser.add_argument("--seq-len", type=int, default=defaults.seq_len, help="tokens in a calibration row")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="chooses the calibration rows")
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished run at --out")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    num_bits, method = parse_scheme_name(args.scheme)
    scheme = QuantizationScheme(
        name=args.scheme,
        num_bits=num_bits,
        method=method,
        group_size=args.group_size,
        symmetric=args.symmetric,
        act_order=args.act_order,
        kv_cache=args.kv_cache,
        refine_steps=resolve_refine_steps(args.refine, args.refine_steps),
    )
    calibration = CalibrationSettings(args.calibration, args.num_samples, args.seq_len, args.seed)
    source = resolve_model(args.model, reporter=reporter, accept_terms=args.accept_terms)
    job = QuantizeJob(source, scheme, calibration, args.out, resume=args.resume)
    plan = plan_quantize(job)
    say_plan(plan, reporter)
    if args.dry_run:
        return CommandResult({"dry_run": True, "config": plan.config, "estimate": asdict(plan.estimate)})
    manifest = finished_or_quantized(job, plan, reporter)
    return CommandResult(quantized_document(args.out, manifest))


def say_plan(plan: QuantizePlan, reporter: Reporter) -> None:
    """What the settings came to, and what they will cost."""
    scheme, estimate = plan.scheme, plan.estimate
    reporter.say(
        f"scheme {describe_scheme(scheme)}, KV cache {scheme.kv_cache}: "
        f"{len(plan.selection.shapes)} modules, {len(plan.selection.unquantized)} left as they are"
    )
    reporter.say(
        f"estimate: {estimate.seconds:.0f} s, {estimate.peak_memory_bytes / 2**30:.1f} GiB of memory, "
        f"{estimate.output_bytes / 1e6:.0f} MB written"
    )


def finished_or_quantized(job: QuantizeJob, plan: QuantizePlan, reporter: Reporter) -> Manifest:
    """The checkpoint at `job.out` if it was made from the same things, else a new one."""
    manifest = find_finished(job.out, plan.stage_key)
    if manifest is not None:
        reporter.say(f"quantize: {job.out} is finished already; nothing redone")
        return manifest
    manifest = quantize_model(job, plan, reporter)
    reporter.say(f"quantize: wrote {job.out}")
    return manifest


def quantized_document(out: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(out),
        "content_digest": manifest.content_digest,
        "config": manifest.config,
        "fallbacks": [asdict(fallback) for fallback in manifest.fallbacks],
        "calibration": manifest.details["calibration"],
    }


def _group_size(text: str) -> int | str:
    if text in ("auto", "channel"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, auto or channel.") from None
