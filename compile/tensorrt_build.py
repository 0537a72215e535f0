"""Planning `trtllm-build`: the flags that a checkpoint needs in a release, and what is refused.

The builder corrects some invalid combinations with a warning; here they are refused or written out, so that
what the plan says is what the engine has. Nothing is run here.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from bitsmith.compile.tensorrt_llm_args import RunLimits
from bitsmith.compile.tensorrt_plan import ExportPlan
from bitsmith.compile.tensorrt_quantization import FP8, FP8_ROWWISE, W4A8_AWQ
from bitsmith.compile.tensorrt_speculation import Speculation, build_flags
from bitsmith.core.errors import Refused

_DEFAULT_MAX_BATCH, _DEFAULT_MAX_TOKENS = 2048, 8192
_SWITCH = ("enable", "disable")
# Flags that a user may set: name -> accepted values.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "gemm_plugin": ("auto", "float16", "bfloat16", "fp8", "disable"),
    "context_fmha": _SWITCH,
    "use_paged_context_fmha": _SWITCH,
    "use_fp8_context_fmha": _SWITCH,
    "multiple_profiles": _SWITCH,
    "reduce_fusion": _SWITCH,
    "user_buffer": _SWITCH,
    "streamingllm": _SWITCH,
    "tokens_per_block": ("16", "32", "64", "128"),
}


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """flags: builder options set by name, such as {"tokens_per_block": "64"}."""

    limits: RunLimits
    speculation: Speculation | None = None
    flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """options: everything after `trtllm-build` but the two directories."""

    options: tuple[str, ...]
    has_paged_attention: bool

    def command(self, checkpoint: str, output: str) -> tuple[str, ...]:
        return ("trtllm-build", "--checkpoint_dir", checkpoint, "--output_dir", output, *self.options)


def plan_build(export: ExportPlan, settings: BuildSettings) -> BuildPlan:
    """Raises Refused naming the flag, the value and the release that does not take it."""
    flags = _resolve_flags(export, dict(settings.flags))
    limits = _limits(export, settings)
    options: list[str] = []
    for name, value in (*limits.items(), *flags.items()):
        options += [f"--{name}", value]
    if settings.speculation is not None:
        options += build_flags(settings.speculation)
        _check_draft(settings)
    return BuildPlan(tuple(options), flags["use_paged_context_fmha"] == "enable")


def _limits(export: ExportPlan, settings: BuildSettings) -> dict[str, str]:
    limits = settings.limits
    max_model_len = limits.max_model_len or export.decoder.max_context
    if max_model_len > export.decoder.max_context:
        raise Refused(
            f"--max-model-len {max_model_len} is more than the model was made for "
            f"({export.decoder.context_reason}); lower it."
        )
    options = {"max_seq_len": str(max_model_len), "max_beam_width": "1"}
    if limits.max_batch_size is not None:
        options["max_batch_size"] = str(limits.max_batch_size)
    if limits.max_num_tokens is not None:
        options["max_num_tokens"] = str(limits.max_num_tokens)
    return options | {"workers": str(export.model.world_size)}


def _check_draft(settings: BuildSettings) -> None:
    assert settings.speculation is not None
    max_batch = settings.limits.max_batch_size or _DEFAULT_MAX_BATCH
    max_tokens = settings.limits.max_num_tokens or _DEFAULT_MAX_TOKENS
    needed = max_batch * (settings.speculation.max_draft_len + 1)
    if max_tokens < needed:
        raise Refused(
            f"Speculation with {settings.speculation.max_draft_len} drafted tokens needs --max-num-tokens "
            f"{needed} for --max-batch-size {max_batch}, not {max_tokens}; raise it or lower the batch."
        )


def _resolve_flags(export: ExportPlan, asked: dict[str, str]) -> dict[str, str]:
    _check_names(asked)
    quant, release = export.model.quant, export.release
    has_fp8_kv = quant.kv_cache_quant_algo == "FP8"
    with_fp8_attention = (FP8,) if release.is_legacy else (FP8, W4A8_AWQ)
    has_fp8_attention = has_fp8_kv and quant.quant_algo in with_fp8_attention
    flags = {
        "use_paged_context_fmha": "enable" if export.has_paged_attention else "disable",
        "use_fp8_context_fmha": "enable" if has_fp8_attention else "disable",
    }
    if quant.quant_algo not in (FP8, FP8_ROWWISE):
        flags["gemm_plugin"] = "auto"  # reaches the products that are not quantized
    _check_attention(export, asked, flags)
    _check_fusion(export, asked)
    if asked.get("context_fmha") == "disable" or asked.get("streamingllm") == "enable":
        flags |= {"use_paged_context_fmha": "disable", "use_fp8_context_fmha": "disable"}
    return flags | asked


def _check_names(asked: Mapping[str, str]) -> None:
    for name, value in asked.items():
        if name not in _CHOICES:
            raise Refused(f"trtllm-build flag {name!r} cannot be set here. Valid: {', '.join(_CHOICES)}.")
        if value not in _CHOICES[name]:
            raise Refused(f"trtllm-build flag {name} takes {', '.join(_CHOICES[name])}, not {value!r}.")


def _check_attention(export: ExportPlan, asked: Mapping[str, str], flags: Mapping[str, str]) -> None:
    quant, release = export.model.quant, export.release
    algo, kv_algo = quant.quant_algo or "unquantized", quant.kv_cache_quant_algo
    is_off = asked.get("context_fmha") == "disable"
    if asked.get("use_paged_context_fmha") == "enable":
        if not export.has_paged_attention:
            raise Refused(
                f"use_paged_context_fmha cannot be on with {kv_algo} KV cache and {algo} weights in "
                f"TensorRT-LLM {release}. Use FP8 weights, or --kv-cache bf16."
            )
        if is_off or asked.get("streamingllm") == "enable":
            raise Refused("use_paged_context_fmha needs context_fmha, and does not go with streamingllm.")
    if asked.get("use_fp8_context_fmha") == "enable" and (
        flags["use_fp8_context_fmha"] != "enable" or is_off
    ):
        raise Refused(
            f"use_fp8_context_fmha needs FP8 KV cache, weights that allow it, and context_fmha; here are "
            f"{kv_algo} KV cache and {algo} weights in TensorRT-LLM {release}."
        )
    if asked.get("use_fp8_context_fmha") == "disable" and flags["use_fp8_context_fmha"] == "enable":
        raise Refused("FP8 KV cache with paged context attention forces use_fp8_context_fmha on; omit it.")
    if asked.get("streamingllm") == "enable" and export.model.family != "llama":
        raise Refused(f"streamingllm is for Llama only, not {export.model.architecture}.")
    if asked.get("gemm_plugin") == "fp8" and quant.quant_algo != FP8:
        raise Refused(f"gemm_plugin fp8 needs FP8 weights with static scales, not {algo}.")


def _check_fusion(export: ExportPlan, asked: Mapping[str, str]) -> None:
    if asked.get("reduce_fusion") == "enable":
        is_possible = export.model.tp_size > 1 and export.model.family in ("llama", "gemma2")
        if not is_possible:
            raise Refused("reduce_fusion needs tensor parallelism and a Llama or Gemma 2 architecture.")
    if asked.get("user_buffer") == "enable" and asked.get("reduce_fusion") != "enable":
        raise Refused("user_buffer needs reduce_fusion=enable.")


def build_script(plan: BuildPlan, release: object) -> str:
    """build.sh: the command, runnable wherever the directory is and the release is installed."""
    command = " \\\n  ".join(
        shlex.quote(word) if not word.startswith('"') else word
        for word in plan.command('"$here/checkpoint"', '"$here/engine"')
    )
    return f"""#!/usr/bin/env bash
# Builds the engine with TensorRT-LLM {release}, on a machine with the GPU that shall run it.
# In a container: docker run --rm --gpus all -v "$PWD:$PWD" -w "$PWD" IMAGE ./build.sh
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
{command}
"""
