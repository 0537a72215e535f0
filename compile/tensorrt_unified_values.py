"""Values of a unified checkpoint: finite, in range, and equal where fused layers share them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bitsmith.compile.tensorrt_check_values import large_scale
from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_quantization import FP8, W4A8_AWQ
from bitsmith.core.checkpoint import CheckpointReader

# Suffix -> largest plausible scale; see tensorrt_check_values.py.
_LIMITS = {"weight_scale": 1.0, "weight_scale_2": 1.0, "input_scale": 100.0, "k_scale": 32.0, "v_scale": 32.0}
_NVFP4_BLOCK_LIMIT = 448.0  # block scales are FP8 numbers beside a second, small scale
_FUSED_GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def check_unified_values(
    reader: CheckpointReader, algo: str | None, section: Mapping[str, Any]
) -> Iterator[Finding]:
    """Every tensor is read once; names and shapes are checked elsewhere."""
    for name in reader.names:
        tensor = reader.tensor(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            text = "has values that are not finite; quantize again and look at that layer's calibration."
            yield refuse("not-finite", name, text)
            continue
        suffix = name.rpartition(".")[2]
        if suffix in _LIMITS and tensor.numel():
            is_block = tensor.dtype == torch.float8_e4m3fn
            limit = _NVFP4_BLOCK_LIMIT if is_block else _LIMITS[suffix]
            yield from _check_scale(name, suffix, tensor.float(), limit)
        elif suffix == "pre_quant_scale" and bool((tensor.float() <= 0).any()):
            yield refuse(
                "pre-quant-range", name, "must be positive: inputs are multiplied by it; write ones."
            )
        elif suffix == "weight" and ".layers." in name and not bool(tensor.any()) and "norm" not in name:
            yield refuse("all-zero", name, "is all zero; export it again.")
    if algo == W4A8_AWQ:
        yield from _check_shared(reader, ("input_scale", "weight_scale_2"))
    if algo == FP8:
        yield from _check_dynamic(reader)
    if section.get("kv_cache_quant_algo") == "FP8":
        yield from _check_kv(reader)


def _check_scale(name: str, suffix: str, scale: torch.Tensor, limit: float) -> Iterator[Finding]:
    if bool((scale < 0).any()):
        yield refuse(
            "scale-negative", name, "has negative scales; a scale is amax divided by the grid's end."
        )
    elif suffix != "weight_scale" and bool((scale == 0).any()):
        yield refuse("scale-zero", name, "is zero; calibrate again.")
    elif not bool(scale.any()):
        yield refuse("scale-zero", name, "is all zero; quantize again.")
    elif float(scale.median()) > limit:
        text = f"is {float(scale.median()):.4g}; a reciprocal of real / stored? write 1 / scale."
        yield refuse("scale-range", name, text)
    elif float(scale.max()) > limit:
        yield warn("scale-large", name, large_scale(scale, "weights"))


def _check_shared(reader: CheckpointReader, suffixes: tuple[str, ...]) -> Iterator[Finding]:
    """Parts of fused layers must agree, or an assertion fails while loading."""
    layers = {name.split(".")[2] for name in reader.names if name.startswith("model.layers.")}
    for layer in sorted(layers, key=int):
        for block, parts in _FUSED_GROUPS:
            for suffix in suffixes:
                names = [f"model.layers.{layer}.{block}.{part}.{suffix}" for part in parts]
                values = {float(reader.tensor(name).max()) for name in names if name in reader}
                if len(values) > 1:
                    text = f"differs between {', '.join(parts)}, which are fused; write their largest to all."
                    yield refuse("shared-scale", names[0], text)


def _check_dynamic(reader: CheckpointReader) -> Iterator[Finding]:
    missing = [
        name
        for name in reader.names
        if name.endswith(".weight_scale") and name.replace(".weight_scale", ".input_scale") not in reader
    ]
    if missing:
        text = (
            f"has no input_scale beside it ({len(missing)} modules): inputs are scaled at run time, slower."
        )
        yield warn("dynamic-inputs", missing[0], text)


def _check_kv(reader: CheckpointReader) -> Iterator[Finding]:
    for name in reader.names:
        if name.endswith((".k_scale", ".v_scale")):
            scale = float(reader.tensor(name).max())
            if 1.0 < scale <= _LIMITS["k_scale"]:
                text = (
                    f"is {scale:.4g}: keys or values reach beyond 448 and saturate, as this scale is ignored."
                )
                yield warn("kv-saturates", name, text)
