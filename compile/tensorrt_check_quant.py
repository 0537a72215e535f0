"""Checks of a TensorRT-LLM checkpoint's quantization section against the release that shall build it."""

from collections.abc import Iterator, Mapping
from typing import Any

from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_quantization import (
    FP8,
    FP8_ROWWISE,
    GROUPWISE,
    KNOWN_ALGOS,
    KV_ALGOS,
    SQ_PER_CHANNEL,
    SQ_PLUGINS,
    UNCHECKED_ALGOS,
    W4A8_AWQ,
    W4A16_GPTQ,
    WEIGHT_ONLY,
    QuantConfig,
)
from bitsmith.compile.tensorrt_release import Release

_WHERE = "config.json: quantization"
# SM100-119: the builder raises for these.
_NOT_ON_BLACKWELL = (*WEIGHT_ONLY, *GROUPWISE, SQ_PER_CHANNEL, *SQ_PLUGINS, FP8_ROWWISE)


def check_quantization(model: EngineModel, body: Mapping[str, Any], release: Release) -> Iterator[Finding]:
    """All of it; a refusal of code `quant-algo` means that the tensors cannot be named."""
    yield from _check_algos(model)
    yield from _check_excludes(model)
    if model.quant.quant_algo in GROUPWISE:
        yield from _check_groups(model, body.get("quantization") or {})
    yield from _check_release(model, release)
    yield from _check_gpus(model, release)


def _check_algos(model: EngineModel) -> Iterator[Finding]:
    algo, kv_algo = model.quant.quant_algo, model.quant.kv_cache_quant_algo
    if algo in UNCHECKED_ALGOS:
        text = f"{algo!r} exists, but its tensors are not known well enough to check or export them here."
        yield refuse("quant-algo", f"{_WHERE}.quant_algo", text)
    elif algo is not None and algo not in KNOWN_ALGOS:
        text = f"{algo!r} is not one of {', '.join(KNOWN_ALGOS)}."
        yield refuse("quant-algo", f"{_WHERE}.quant_algo", text)
    if kv_algo is not None and kv_algo not in KV_ALGOS:
        text = f"{kv_algo!r} is not one of {', '.join(KV_ALGOS)}, or null for the model's dtype."
        yield refuse("kv-algo", f"{_WHERE}.kv_cache_quant_algo", text)


def _check_excludes(model: EngineModel) -> Iterator[Finding]:
    quant, where = model.quant, f"{_WHERE}.exclude_modules"
    if quant.quant_algo is None:
        return
    if not quant.is_excluded("lm_head"):
        text = (
            "the list replaces the defaults and does not cover lm_head, which would be quantized though the "
            'file has it dense; add "lm_head".'
        )
        yield refuse("exclude-head", where, text)
    if quant.quant_algo in WEIGHT_ONLY and not quant.is_excluded("transformer.vocab_embedding"):
        text = (
            "the list replaces the defaults and does not cover vocab_embedding, which weight-only modes then "
            'quantize; write null or ["*lm_head", "*vocab_embedding"].'
        )
        yield refuse("exclude-embedding", where, text)


def _check_groups(model: EngineModel, section: Mapping[str, Any]) -> Iterator[Finding]:
    quant = model.quant
    if "group_size" not in section:
        text = "is absent, so 128 is used (documentation says 64); write the size that the scales have."
        yield warn("group-size", f"{_WHERE}.group_size", text)
    if quant.quant_algo == W4A8_AWQ and quant.group_size != 128:
        text = f"W4A8_AWQ takes groups of 128 only, not {quant.group_size}; quantize again."
        yield refuse("group-size", f"{_WHERE}.group_size", text)
    unit = max(128 if quant.quant_algo == W4A8_AWQ else 64, quant.group_size)
    for linear in model.linears():
        for axis, size in (("outputs", linear.out_features), ("inputs", linear.in_features)):
            if size % unit:
                text = (
                    f"{size} {axis} per rank are not a multiple of {unit}, so the loader pads the layer and "
                    "this file no longer fits; use a smaller tensor-parallel size or another scheme."
                )
                yield refuse("groupwise-size", f"{linear.name}", text)
    if quant.quant_algo == W4A16_GPTQ:
        text = (
            "the weights are laid out for one GPU architecture, which the file does not name; build on the "
            "architecture it was made for, or export as W4A16_AWQ, which is laid out at build."
        )
        yield warn("gptq-layout", f"{_WHERE}.quant_algo", text)


def _check_release(model: EngineModel, release: Release) -> Iterator[Finding]:
    quant = model.quant
    if quant.quant_algo == FP8_ROWWISE and release.is_meta_rowwise:
        text = f"{release} quantizes only inner MLPs in this mode; build this with 1.0 or newer."
        yield refuse("rowwise-release", f"{_WHERE}.quant_algo", text)
    if loses_paged_attention(quant, release) and quant.kv_cache_quant_algo == "FP8":
        text = (
            "FP8 KV cache with weights that are not FP8: build with --use_paged_context_fmha disable; KV "
            "reuse and chunked prefill are lost."
        )
        yield warn("fp8-kv-without-fp8", f"{_WHERE}.kv_cache_quant_algo", text)
    if quant.kv_cache_quant_algo == "INT8":
        text = "build with --use_paged_context_fmha disable; KV reuse and chunked prefill are lost."
        yield warn("int8-kv", f"{_WHERE}.kv_cache_quant_algo", text)


def loses_paged_attention(quant: QuantConfig, release: Release) -> bool:
    """Whether paged context attention, and with it KV reuse and chunked prefill, must be off."""
    if quant.kv_cache_quant_algo is None:
        return False
    if quant.kv_cache_quant_algo == "INT8":
        return True
    with_fp8_attention = (FP8,) if release.is_legacy else (FP8, W4A8_AWQ)
    return quant.quant_algo not in with_fp8_attention


def _check_gpus(model: EngineModel, release: Release) -> Iterator[Finding]:
    quant = model.quant
    if release.is_legacy:
        return
    if quant.quant_algo in _NOT_ON_BLACKWELL or quant.kv_cache_quant_algo == "INT8":
        text = "the builder refuses this on SM100 to SM119 (Blackwell); build on Hopper, Ada or Ampere."
        yield warn("not-on-blackwell", f"{_WHERE}.quant_algo", text)
