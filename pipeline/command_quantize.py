"""`bitsmith quantize`: a model becomes a quantized checkpoint."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from bitsmith.core.artifact import find_finished
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import MANIFEST_NAME, Manifest
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import (
    DEFAULT_REFINE_STEPS,
    SCHEME_NAMES,
    KVCacheScheme,
    QuantizationScheme,
    parse_scheme_name,
    resolve_int8_inputs,
    resolve_refine_steps,
)
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.scheme_text import describe_scheme
from bitsmith.quantize.backend import BACKENDS, Backend, choose_backend
from bitsmith.quantize.budget import read_budget
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.deployment import TARGETS, Deployment, DeploymentTarget
from bitsmith.quantize.manifest_details import say_calibration
from bitsmith.quantize.packed_format import FORMATS
from bitsmith.quantize.plan import QuantizeJob, QuantizePlan
from bitsmith.quantize.scheme_checks import needs_calibration


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
        "--activation-scale",
        choices=["token", "tensor"],
        help="w8a8-int8: a scale for each token at run time (the default), or one static scale per tensor",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="of the checkpoint: compressed-tensors (the default), gptq (version 1, symmetric only), gptq_v2 "
        "or awq (4 bits)",
    )
    parser.add_argument(
        "--kv-cache",
        choices=get_args(KVCacheScheme),
        default="none",
        help="calibrate scales for this KV cache",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--bits-budget",
        type=float,
        metavar="B",
        help="2, 3, 4 or 8 bits for each module, by what each is measured to cost, of B bits a weight on "
        "average over the quantized modules: scales and zero points counted. The scheme gives the method",
    )
    budget.add_argument(
        "--size-budget",
        metavar="SIZE",
        help="the same for the size of the checkpoint's weight files, such as 90MB",
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
        metavar="SOURCE",
        help="builtin (a fallback made from Python's own documentation; the default), FILE.jsonl, FILE.txt, "
        "or hf:DATASET",
    )
    parser.add_argument("--num-samples", type=int, help=f"calibration rows (default {defaults.num_samples})")
    parser.add_argument("--seq-len", type=int, help=f"tokens in a row (default {defaults.seq_len})")
    parser.add_argument("--seed", type=int, help=f"chooses the calibration rows (default {defaults.seed})")
    parser.add_argument(
        "--for",
        dest="target",
        choices=TARGETS,
        help="plan for where it will run; refuse what that cannot take",
    )
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="with --for: ranks (1)")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="bitsmith",
        help="who quantizes: bitsmith (the default), or nvidia-modelopt on the same calibration tokens",
    )
    parser.add_argument(
        "--backend-python",
        metavar="PATH",
        help="with --backend modelopt: a Python that has it (default: one made in the user's cache)",
    )
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
        int8_inputs=resolve_int8_inputs(args.scheme, args.activation_scale),
    )
    backend = choose_backend(args.backend, args.backend_python)
    backend.check(scheme)
    budget = read_budget(args.bits_budget, args.size_budget)
    calibration = _calibration(args, calibrates=budget is not None or needs_calibration(scheme))
    source = resolve_model(args.model, reporter=reporter, accept_terms=args.accept_terms)
    deployment = make_deployment(args.target, args.tensor_parallel)
    job = QuantizeJob(
        source,
        scheme,
        calibration,
        args.out,
        resume=args.resume,
        deployment=deployment,
        format=args.format,
        budget=budget,
    )
    plan = backend.plan(job)
    say_plan(plan, reporter)
    if args.dry_run:
        return CommandResult({"dry_run": True, "config": plan.config, "estimate": asdict(plan.estimate)})
    manifest = finished_or_quantized(backend, job, plan, reporter)
    return CommandResult(quantized_document(args.out, manifest))


def _calibration(args: argparse.Namespace, *, calibrates: bool) -> CalibrationSettings:
    """What was asked for, else the defaults. Asking is refused where nothing is calibrated."""
    asked = {
        "source": args.calibration,
        "num_samples": args.num_samples,
        "seq_len": args.seq_len,
        "seed": args.seed,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if given and not calibrates:
        raise Refused(
            f"Scheme {args.scheme!r} with KV cache {args.kv_cache!r} calibrates nothing, so --calibration, "
            "--num-samples, --seq-len and --seed do not apply. Leave them out."
        )
    return CalibrationSettings(**given)


def make_deployment(target: DeploymentTarget | None, tensor_parallel: int | None) -> Deployment | None:
    if target is not None:
        return Deployment(target, 1 if tensor_parallel is None else tensor_parallel)
    if tensor_parallel is not None:
        raise Refused("--tensor-parallel belongs to --for, which is not given; name the target too.")
    return None


def say_plan(plan: QuantizePlan, reporter: Reporter) -> None:
    """What the settings came to, and what they will cost."""
    scheme, estimate = plan.scheme, plan.estimate
    form = "" if plan.format == "compressed-tensors" else f", format {plan.format}"
    reporter.say(
        f"scheme {describe_scheme(scheme, plan.budget)}, KV cache {scheme.kv_cache}{form}: "
        f"{len(plan.selection.shapes)} modules, {len(plan.selection.unquantized)} left as they are"
    )
    if plan.budget is not None:
        reporter.say(plan.budget.describe())
    seconds = "time not known" if estimate.seconds is None else f"{estimate.seconds:.0f} s"
    reporter.say(
        f"estimate: {seconds}, {estimate.peak_memory_bytes / 2**30:.1f} GiB of memory, "
        f"{estimate.output_bytes / 1e6:.0f} MB written"
    )
    say_calibration(plan, reporter)


def finished_or_quantized(
    backend: Backend, job: QuantizeJob, plan: QuantizePlan, reporter: Reporter
) -> Manifest:
    """The checkpoint at `job.out` if it was made from the same things, else a new one."""
    manifest = find_finished(job.out, plan.stage_key)
    if manifest is not None:
        reporter.say(f"quantize: {job.out} is finished already; nothing redone")
        return manifest
    if (job.out / MANIFEST_NAME).exists():
        reporter.say(f"{job.out} holds another artifact; it is replaced when this one is finished.")
    manifest = backend.quantize(job, plan, reporter)
    reporter.say(f"quantize: wrote {job.out}")
    return manifest


def quantized_document(out: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(out),
        "content_digest": manifest.content_digest,
        "config": manifest.config,
        "fallbacks": [asdict(fallback) for fallback in manifest.fallbacks],
        "calibration": manifest.details["calibration"],
        "bit_plan": manifest.details.get("bit_plan"),
    }


def _group_size(text: str) -> int | str:
    if text in ("auto", "channel"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, auto or channel.") from None
