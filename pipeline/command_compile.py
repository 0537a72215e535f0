"""`bitsmith compile`: a checkpoint becomes an engine."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from bitsmith.compile.decoder_plan import HeadType
from bitsmith.compile.job import CompileJob, compile_engine, plan_compile
from bitsmith.compile.tensorrt_job import plan_tensorrt
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.core.artifact import find_finished
from bitsmith.core.manifest import MANIFEST_NAME, Manifest
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult
from bitsmith.pipeline.tensorrt_options import (
    TARGETS,
    add_tensorrt_arguments,
    refuse_for_cpu,
    tensorrt_job,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a directory that `quantize` wrote, or any model reference"
    )
    parser.add_argument(
        "--target",
        choices=["cpu", *TARGETS],
        required=True,
        help="cpu: the native engine; tensorrt-llm: checkpoint and engine by trtllm-build (up to 1.2.1); "
        "tensorrt-llm-pytorch: checkpoint and launch files for its PyTorch backend (1.0 and newer)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the engine goes")
    parser.add_argument(
        "--kv-cache",
        choices=["auto", "fp8", "int8", "bf16", "fp32"],
        default="auto",
        help="auto (the default): what the checkpoint declares, else bf16; fp32: cpu only",
    )
    parser.add_argument(
        "--kv-scale",
        choices=["calibrated", "ones"],
        default="calibrated",
        help="ones: accept an FP8 or INT8 cache without calibrated scales",
    )
    parser.add_argument(
        "--activations",
        choices=["auto", "int8", "bf16", "fp32"],
        default="auto",
        help="what products take their inputs in; auto (the default) is printed once resolved",
    )
    parser.add_argument(
        "--lm-head",
        choices=get_args(HeadType),
        default="checkpoint",
        help="checkpoint (the default): the head as stored; int8: rounded, half of bf16's bytes a token",
    )
    parser.add_argument(
        "--max-batch-size", type=int, metavar="N", help="requests in one step (32, or the target's own)"
    )
    parser.add_argument(
        "--max-num-tokens", type=int, metavar="N", help="tokens in one step (1024, or the target's own)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of one request in all")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: the machine's cores")
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")
    add_tensorrt_arguments(parser)


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    checkpoint = Path(args.checkpoint)
    if not (checkpoint / MANIFEST_NAME).is_file():
        source = resolve_model(args.checkpoint, reporter=reporter, accept_terms=args.accept_terms)
        checkpoint = source.path
    compiled = _compile_cpu if args.target == "cpu" else _compile_tensorrt
    manifest = compiled(args, checkpoint, reporter)
    document = {
        "path": str(args.out),
        "content_digest": manifest.content_digest,
        "config": manifest.config,
        "details": manifest.details,
        "fallbacks": [asdict(fallback) for fallback in manifest.fallbacks],
    }
    return CommandResult(document)


def _compile_cpu(args: argparse.Namespace, checkpoint: Path, reporter: Reporter) -> Manifest:
    refuse_for_cpu(args, _defaults())
    limits = {name: getattr(args, name) for name in ("max_batch_size", "max_num_tokens", "max_model_len")}
    job = CompileJob(
        checkpoint=checkpoint,
        out=args.out,
        kv_cache=args.kv_cache,
        activations=args.activations,
        kv_scale=args.kv_scale,
        num_threads=args.num_threads,
        lm_head=args.lm_head,
        **{name: value for name, value in limits.items() if value is not None},
    )
    return compile_engine(job, plan_compile(job), reporter)


def _compile_tensorrt(args: argparse.Namespace, checkpoint: Path, reporter: Reporter) -> Manifest:
    job = tensorrt_job(args, _defaults(), checkpoint)
    plan = plan_tensorrt(job)
    manifest = find_finished(job.out, plan.stage_key)
    if manifest is not None:
        reporter.say(f"{job.out} is finished already; nothing redone")
    else:
        manifest = compile_tensorrt(job, plan, reporter)
    reporter.say(f"{job.out}: {manifest.details['state']}")
    return manifest


def _defaults() -> argparse.Namespace:
    """What `args` holds of every option that was not given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["CHECKPOINT", "--target", "cpu", "--out", "DIR"])
