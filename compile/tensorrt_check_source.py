"""A checkpoint against the model it came from: configuration, norms, and every linear turned back to floats.

What no file can tell by itself (swapped branches, exchanged nibbles, a scale used upside down) shows here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.decoder_config import DecoderConfig, read_decoder_config
from bitsmith.compile.tensorrt_checkpoint import EngineCheckpoint
from bitsmith.compile.tensorrt_engine_config import global_rotary
from bitsmith.compile.tensorrt_finding import Finding, refuse
from bitsmith.compile.tensorrt_layout import module_name
from bitsmith.compile.tensorrt_linear import Int4Linear, Int8Linear, Linear
from bitsmith.compile.tensorrt_names import EMBEDDING, FINAL_NORM, HEAD, hf_norm_name
from bitsmith.compile.tensorrt_quantization import (
    FP8,
    FP8_ROWWISE,
    SQ_PER_CHANNEL,
    W4A8_AWQ,
    W4A16,
    W4A16_AWQ,
    W8A16,
)
from bitsmith.compile.tensorrt_rounding import relative_error
from bitsmith.compile.tensorrt_source import ExportSource, open_source

# Relative error (Frobenius) that rounding to each grid can explain; measured ones are about a half of it.
ERROR_LIMITS: Mapping[str | None, float] = {
    None: 0.005,
    FP8: 0.06,
    FP8_ROWWISE: 0.06,
    SQ_PER_CHANNEL: 0.04,
    W4A16_AWQ: 0.3,
    W4A8_AWQ: 0.3,
    W8A16: 0.04,
    W4A16: 0.3,
}
Alteration = Callable[[Linear], Linear]


def check_against_source(
    checkpoint: EngineCheckpoint, body: Mapping[str, Any], path: Path
) -> Iterator[Finding]:
    """path: a dense model, or a quantized checkpoint that this one was exported from."""
    source = open_source(path)
    decoder = read_decoder_config(source.config)
    mismatches = list(_check_config(checkpoint, body, decoder))
    yield from mismatches
    if mismatches:
        return
    if checkpoint.model.quant.quant_algo not in ERROR_LIMITS:
        text = f"{checkpoint.model.quant.quant_algo} is laid out for a GPU and cannot be turned back here."
        yield refuse("source-unreadable", "config.json", text)
        return
    yield from _check_tables(checkpoint, source)
    for layer in range(checkpoint.model.num_layers):
        yield from _check_layer(checkpoint, source, layer)


def _check_config(
    checkpoint: EngineCheckpoint, body: Mapping[str, Any], hf: DecoderConfig
) -> Iterator[Finding]:
    model = checkpoint.model
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden_size", model.hidden_size, hf.hidden_size),
        ("num_hidden_layers", model.num_layers, hf.num_layers),
        ("num_attention_heads", model.num_heads, hf.num_heads),
        ("num_key_value_heads", model.num_kv_heads, hf.num_kv_heads),
        ("head_size", model.head_size, hf.head_size),
        ("intermediate_size", model.intermediate_size, hf.intermediate_size),
        ("norm_epsilon", body.get("norm_epsilon", 1e-5), hf.rms_norm_eps),
        ("rotary_base", body.get("rotary_base", 10000.0), global_rotary(hf).theta),
        ("attn_bias", model.attn_bias, hf.qkv_bias),
        ("mlp_bias", model.mlp_bias, hf.mlp_bias),
    ]
    for key, ours, theirs in pairs:
        is_same = abs(ours - theirs) <= 1e-6 * abs(theirs) if isinstance(theirs, float) else ours == theirs
        if not is_same:
            text = f"is {ours!r}, the source model has {theirs!r}; correct it."
            yield refuse("source-config", f"config.json: {key}", text)
    # ModelOpt pads the vocabulary to a multiple of 64 and writes the padded size.
    if not hf.vocab_size <= model.vocab_size <= -(-hf.vocab_size // 64) * 64:
        text = f"is {model.vocab_size}, the source model has {hf.vocab_size}; correct it."
        yield refuse("source-config", "config.json: vocab_size", text)


def _check_tables(checkpoint: EngineCheckpoint, source: ExportSource) -> Iterator[Finding]:
    """Embedding, head and final norm, which no algorithm here quantizes."""
    wanted = {f"{EMBEDDING}.weight", f"{FINAL_NORM}.weight", f"{HEAD}.weight"}
    for name, ours in checkpoint.tables():
        if name not in wanted:
            continue
        stored = name if name in source else f"{EMBEDDING}.weight"  # a tied head
        theirs = source.tensor(stored).float()
        error = relative_error(ours[: theirs.shape[0]], theirs)
        if error > _norm_limit(checkpoint):
            hint = " Gemma's norms are stored with 1 added." if name == f"{FINAL_NORM}.weight" else ""
            text = f"differs from the source by {error:.3g} (relative); export it again.{hint}"
            yield refuse("source-table", name, text)


def _norm_limit(checkpoint: EngineCheckpoint) -> float:
    """Adding 1 in bf16 rounds at 2^-8 of the sum."""
    return 0.02 if checkpoint.model.is_gemma else 0.005


def _check_layer(checkpoint: EngineCheckpoint, source: ExportSource, layer: int) -> Iterator[Finding]:
    model = checkpoint.model
    folded = {
        "attention.qkv": "input_layernorm",
        "mlp.fc": "pre_feedforward_layernorm" if model.is_gemma else "post_layernorm",
    }
    folded["mlp.gate"] = folded["mlp.fc"]
    for norm, _ in model.norms():
        if norm not in folded.values() or model.quant.quant_algo not in (W4A16_AWQ, W4A8_AWQ):
            yield from _check_norm(checkpoint, source, layer, norm)
    for linear in model.linears():
        # What follows a norm is compared together with it: smoothing may have moved factors between them.
        norm_name = folded.get(linear.name)
        factors = None if norm_name is None else _norm_pair(checkpoint, source, layer, norm_name)
        yield from _check_linear(checkpoint, source, layer, linear.name, factors)


def _norm_pair(
    checkpoint: EngineCheckpoint, source: ExportSource, layer: int, norm: str
) -> tuple[Tensor, Tensor]:
    """Factors by which (our, the source's) norm multiplies its output."""
    model = checkpoint.model
    file = checkpoint.stage(layer // model.layers_per_rank)[0]
    ours = file.tensor(module_name(layer % model.layers_per_rank, f"{norm}.weight")).float()
    theirs = source.tensor(f"{hf_norm_name(layer, norm)}.weight").float()
    return ours, theirs + 1.0 if model.is_gemma else theirs


def _check_norm(
    checkpoint: EngineCheckpoint, source: ExportSource, layer: int, norm: str
) -> Iterator[Finding]:
    ours, theirs = _norm_pair(checkpoint, source, layer, norm)
    error = relative_error(ours, theirs)
    if error > _norm_limit(checkpoint):
        hint = "add 1 to every Gemma norm" if checkpoint.model.is_gemma else "export it again"
        text = f"differs from the source by {error:.3g} (relative); {hint}."
        yield refuse("source-norm", module_name(layer, norm), text)


def _check_linear(
    checkpoint: EngineCheckpoint,
    source: ExportSource,
    layer: int,
    name: str,
    factors: tuple[Tensor, Tensor] | None,
) -> Iterator[Finding]:
    limit = max(ERROR_LIMITS[checkpoint.model.quant.quant_algo], ERROR_LIMITS[source.scheme.quant_algo])
    ours_factor, theirs_factor = factors if factors is not None else (torch.ones(1), torch.ones(1))

    def error_of(real: Tensor, hf_name: str) -> float:
        theirs = source.linear(hf_name).dequantize()
        if real.shape != theirs.shape:
            return float("inf")
        return relative_error(real * ours_factor, theirs * theirs_factor)

    for position, (hf_name, real) in enumerate(checkpoint.dequantized_linears(layer, name)):
        error = error_of(real, hf_name)
        if error <= limit:
            continue

        def altered(alteration: Alteration, position: int = position, hf_name: str = hf_name) -> float:
            changed = list(checkpoint.dequantized_linears(layer, name, alteration))
            return error_of(changed[position][1], hf_name)

        hint = _explain(real, hf_name, limit, error_of, altered)
        text = f"differs from {hf_name} by {error:.3g} (relative; limit {limit:g}). {hint}"
        yield refuse("source-weight", module_name(layer, name), text)


def _explain(
    real: Tensor,
    hf_name: str,
    limit: float,
    error_of: Callable[[Tensor, str], float],
    altered: Callable[[Alteration], float],
) -> str:
    """The mistake that would account for the difference, if one of the known ones does."""
    swaps = {"gate_proj": "up_proj", "up_proj": "gate_proj", "q_proj": "k_proj", "k_proj": "v_proj"}
    stem, _, leaf = hf_name.rpartition(".")
    other = swaps.get(leaf)
    if other is not None and error_of(real, f"{stem}.{other}") <= limit:
        return f"It holds {other}: exchange them (fc is gate_proj, gate is up_proj; qkv is q, k, v in order)."
    if altered(_exchange_nibbles) <= limit:
        return "Its nibbles are exchanged: the low nibble is the even output row."
    if altered(_invert_pre_quant) <= limit:
        return "Its prequant_scaling_factor is a reciprocal: inputs are multiplied by it, weights divided."
    if altered(_drop_pre_quant) <= limit:
        return "Its weights were not divided by prequant_scaling_factor: divide them, or write ones."
    return "Compare its scales and its layout with docs/tensorrt-llm.md and export it again."


def _exchange_nibbles(linear: Linear) -> Linear:
    if not isinstance(linear, Int4Linear):
        return linear
    num_rows, num_columns = linear.values.shape
    pairs = linear.values.reshape(num_rows // 2, 2, num_columns)
    return replace(linear, values=pairs.flip(1).reshape(num_rows, num_columns))


def _invert_pre_quant(linear: Linear) -> Linear:
    if isinstance(linear, Int4Linear | Int8Linear) and linear.pre_quant_scale is not None:
        return replace(linear, pre_quant_scale=1.0 / linear.pre_quant_scale.float())
    return linear


def _drop_pre_quant(linear: Linear) -> Linear:
    if isinstance(linear, Int4Linear | Int8Linear) and linear.pre_quant_scale is not None:
        return replace(linear, pre_quant_scale=torch.ones_like(linear.pre_quant_scale))
    return linear
