"""`bitsmith compile`: a checkpoint becomes an engine."""

import argparse
from dataclasses import asdict
from pathlib import Path

from bitsmith.compile.job import CompileJob, compile_engine, plan_compile
from bitsmith.core.manifest import MANIFEST_NAME
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.command_result import CommandResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a directory that `quantize` wrote, or any model reference"
    )
    parser.add_argument("--target", choices=["cpu"], required=True, help="cpu: the native engine")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the engine goes")
    parser.add_argument(
        "--kv-cache",
        choices=["auto", "fp8", "bf16", "fp32"],
        default="auto",
        help="auto (the default): what the checkpoint declares, else bf16",
    )
    parser.add_argument(
        "--kv-scale",
        choices=["calibrated", "ones"],
        default="calibrated",
        help="ones: accept an FP8 cache without calibrated scales",
    )
    parser.add_argument(
        "--activations",
        choices=["auto", "int8", "bf16", "fp32"],
        default="auto",
        help="what products take their inputs in; auto (the default) is printed once resolved",
    )
    parser.add_argument(
        "--max-batch-size", type=int, metavar="N", default=32, help="requests in one step (32)"
    )
    parser.add_argument(
        "--max-num-tokens", type=int, metavar="N", default=1024, help="tokens in one step (1024)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of one request in all")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: the machine's cores")
    parser.add_argument("--accept-terms", action="store_true", help="accept a demo model's terms of use")


def run(args: argparse.Namespace, reporter: Reporter) -> CommandResult:
    checkpoint = Path(args.checkpoint)
    if not (checkpoint / MANIFEST_NAME).is_file():
        source = resolve_model(args.checkpoint, reporter=reporter, accept_terms=args.accept_terms)
        checkpoint = source.path
    job = CompileJob(
        checkpoint=checkpoint,
        out=args.out,
        kv_cache=args.kv_cache,
        activations=args.activations,
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_model_len=args.max_model_len,
        kv_scale=args.kv_scale,
        num_threads=args.num_threads,
    )
    manifest = compile_engine(job, plan_compile(job), reporter)
    document = {
        "path": str(args.out),
        "content_digest": manifest.content_digest,
        "config": manifest.config,
        "details": manifest.details,
        "fallbacks": [asdict(fallback) for fallback in manifest.fallbacks],
    }
    return CommandResult(document)
