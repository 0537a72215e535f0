"""The options of `bitsmith compile` that only TensorRT-LLM takes, and the job that they come to."""

import argparse
from pathlib import Path
from typing import Any, get_args

from bitsmith.compile.tensorrt_job import TensorrtJob
from bitsmith.compile.tensorrt_llm_args import RunLimits
from bitsmith.compile.tensorrt_speculation import Speculation, SpeculationKind
from bitsmith.core.errors import Refused

TARGETS = ("tensorrt-llm", "tensorrt-llm-pytorch")
_CPU_ONLY = ("activations", "num_threads", "lm_head")


def add_tensorrt_arguments(parser: argparse.ArgumentParser) -> None:
    """None, False or an empty list: not given. What is not given keeps the job's default."""
    group = parser.add_argument_group("TensorRT-LLM targets only")
    group.add_argument("--trtllm-version", metavar="V", help="release to export for (1.2.1)")
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="ranks that share every layer (1)")
    group.add_argument("--pipeline-parallel", type=int, metavar="N", help="ranks that share the layers (1)")
    group.add_argument("--kv-scale-floor", type=float, metavar="X", help="1.0: ModelOpt's convention (0)")
    group.add_argument("--kv-reuse", action="store_true", help="refuse what could not reuse KV blocks")
    group.add_argument("--chunked-prefill", action="store_true", help="refuse what could not chunk prompts")
    group.add_argument("--speculation", choices=get_args(SpeculationKind), help="speculative decoding")
    group.add_argument("--max-draft-len", type=int, metavar="N", help="drafts of a step (4)")
    group.add_argument("--draft-model", metavar="DIR", help="for draft-target and eagle3")
    group.add_argument(
        "--build-flag", action="append", default=[], metavar="NAME=VALUE", help="an option of trtllm-build"
    )
    group.add_argument("--strict", action="store_true", help="refuse what is not exact or loses a feature")
    group.add_argument("--require-engine", action="store_true", help="refuse without trtllm-build")
    group.add_argument("--trtllm-python", metavar="PATH", help="the Python that has tensorrt_llm")
    group.add_argument("--trtllm-command", metavar="CMD", help='how to run it: "docker run … IMAGE"')
    group.add_argument("--triton", type=Path, metavar="DIR", help="also write a Triton model repository")


def refuse_for_cpu(args: argparse.Namespace, parser_defaults: argparse.Namespace) -> None:
    """Raises Refused naming every option that was given for a target that does not take it."""
    _refuse(args, parser_defaults, set(vars(args)) & _tensorrt_names(), "cpu")


def tensorrt_job(
    args: argparse.Namespace, parser_defaults: argparse.Namespace, checkpoint: Path
) -> TensorrtJob:
    """Raises Refused for options that belong to the native engine."""
    _refuse(args, parser_defaults, set(_CPU_ONLY), args.target)
    given: dict[str, Any] = {
        "trtllm_version": args.trtllm_version,
        "tp_size": args.tensor_parallel,
        "pp_size": args.pipeline_parallel,
        "kv_scale_floor": args.kv_scale_floor,
    }
    return TensorrtJob(
        checkpoint=checkpoint,
        out=args.out,
        target=args.target,
        kv_cache=args.kv_cache,
        kv_scale=args.kv_scale,
        limits=RunLimits(args.max_batch_size, args.max_num_tokens, args.max_model_len),
        has_kv_reuse=args.kv_reuse or None,
        has_chunked_prefill=args.chunked_prefill or None,
        speculation=_speculation(args),
        build_flags=dict(_flag(text) for text in args.build_flag),
        is_strict=args.strict,
        requires_engine=args.require_engine,
        trtllm_python=args.trtllm_python,
        trtllm_command=args.trtllm_command,
        triton=args.triton,
        **{name: value for name, value in given.items() if value is not None},
    )


def _tensorrt_names() -> set[str]:
    parser = argparse.ArgumentParser()
    add_tensorrt_arguments(parser)
    return set(vars(parser.parse_args([])))


def _refuse(args: argparse.Namespace, defaults: argparse.Namespace, names: set[str], target: str) -> None:
    wrong = sorted(name for name in names if getattr(args, name) != getattr(defaults, name))
    if wrong:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise Refused(f"{options}: not for --target {target}. Leave it out, or choose another target.")


def _speculation(args: argparse.Namespace) -> Speculation | None:
    if args.speculation is None:
        if args.max_draft_len is not None or args.draft_model is not None:
            raise Refused("--max-draft-len and --draft-model belong to --speculation, which is not given.")
        return None
    lengths = {} if args.max_draft_len is None else {"max_draft_len": args.max_draft_len}
    return Speculation(args.speculation, model=args.draft_model, **lengths)


def _flag(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise Refused(f"--build-flag {text!r}: write NAME=VALUE.")
    return name, value
