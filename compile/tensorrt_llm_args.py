"""The YAML of LLM arguments for TensorRT-LLM's PyTorch backend, and the two scripts that use it.

Every key is one that docs/tensorrt-llm.md lists: the LLM API rejects unknown ones.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from bitsmith.compile.tensorrt_release import Release
from bitsmith.compile.tensorrt_speculation import Speculation, speculative_config
from bitsmith.core.errors import Refused


@dataclass(frozen=True, slots=True)
class RunLimits:
    """None leaves a limit to TensorRT-LLM's own default."""

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Refused(f"--{name.replace('_', '-')} must be 1 or more, not {value}.")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How the served model shares the GPU. memory_frac: of what is free, for the KV cache."""

    limits: RunLimits
    tp_size: int = 1
    pp_size: int = 1
    memory_frac: float = 0.9
    has_kv_reuse: bool = True
    has_chunked_prefill: bool = False
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if not 0 < self.memory_frac <= 1:
            raise Refused(f"The KV cache's share of free memory must lie in (0, 1], not {self.memory_frac}.")


def llm_arguments(settings: RunSettings, kv_algo: str | None, release: Release) -> dict[str, Any]:
    """Keyword arguments of the LLM class, without the model."""
    limits = settings.limits
    arguments: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": settings.tp_size,
        "pipeline_parallel_size": settings.pp_size,
        "kv_cache_config": {
            "dtype": "fp8" if kv_algo == "FP8" else "auto",
            "free_gpu_memory_fraction": settings.memory_frac,
            "enable_block_reuse": settings.has_kv_reuse,
        },
        "enable_chunked_prefill": settings.has_chunked_prefill,
    }
    pairs = (
        ("max_batch_size", limits.max_batch_size),
        ("max_num_tokens", limits.max_num_tokens),
        ("max_seq_len", limits.max_model_len),
    )
    arguments |= {name: value for name, value in pairs if value is not None}
    if settings.speculation is not None:
        arguments |= speculative_config(settings.speculation, release)
    return arguments


def arguments_yaml(arguments: dict[str, Any]) -> str:
    """For `--extra_llm_api_options`; the command line names the backend itself."""
    body = {key: value for key, value in arguments.items() if key != "backend"}
    return yaml.safe_dump(body, sort_keys=False)


def serve_script(model: str, options: str, backend: str) -> str:
    """serve.sh. model, options: paths beside the script; options "" for none."""
    extra = f' \\\n  --extra_llm_api_options "$here/{options}"' if options else ""
    tokenizer = ' --tokenizer "$here/tokenizer"' if backend == "tensorrt" else ""
    return f"""#!/usr/bin/env bash
# Serves on http://127.0.0.1:8000 with OpenAI's interface. More options may follow: ./serve.sh --port 9000
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec trtllm-serve "$here/{model}" --backend {backend}{tokenizer} --host 127.0.0.1 --port 8000{extra} "$@"
"""


def bench_script(name: str, model: str, options: str) -> str:
    """bench.sh: throughput over a data set that `trtllm-bench prepare-dataset` wrote."""
    return f"""#!/usr/bin/env bash
# Usage: ./bench.sh DATASET [more trtllm-bench options]. Make DATASET with trtllm-bench prepare-dataset.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
dataset="${{1:?give the data set that trtllm-bench prepare-dataset wrote}}"
shift
exec trtllm-bench -m {name} --model_path "$here/{model}" throughput --backend pytorch \\
  --dataset "$dataset" --extra_llm_api_options "$here/{options}" "$@"
"""
