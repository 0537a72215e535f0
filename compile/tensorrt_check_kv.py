"""KV-cache scales of a TensorRT-LLM checkpoint: dequantization scales, one for K and V of a layer."""

from collections.abc import Iterator

from bitsmith.compile.tensor_file import TensorFile
from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_names import kv_scale_name

# amax / 448 of keys and values; a reciprocal of any ordinary scale lies above the second.
_UNUSUAL, _IMPLAUSIBLE = 4.0, 32.0
_TOLERANCE = 1e-5


def check_kv_scales(model: EngineModel, file: TensorFile) -> Iterator[Finding]:
    """Scales of one rank file; only for a configuration that has a quantized cache."""
    if model.quant.kv_cache_quant_algo is None:
        return
    limit = _IMPLAUSIBLE * (448 / 127 if model.quant.kv_cache_quant_algo == "INT8" else 1)
    scales = []
    for index in range(model.layers_per_rank):
        name = kv_scale_name(index)
        if file.header.get(name, ("", ()))[1] != (1,):
            continue  # reported with the names
        scale = float(file.tensor(name))
        scales.append(scale)
        yield from _check_scale(scale, limit, f"{file.path.name}: {name}")
        yield from _check_extras(file, name, scale)
    if scales and all(scale == 1.0 for scale in scales):
        text = (
            "all KV scales are exactly 1.0: not distinguishable from uncalibrated, though it is NVIDIA's own "
            "convention; compare the quality, or export calibrated scales."
        )
        yield warn("kv-scale-ones", file.path.name, text)


def _check_scale(scale: float, limit: float, where: str) -> Iterator[Finding]:
    if scale <= 0:
        text = f"is {scale:g}; it must be positive (amax / 448 for FP8). Calibrate again, or write 1.0."
        yield refuse("kv-scale-zero", where, text)
    elif scale > limit:
        text = f"is {scale:.4g}; it looks like a reciprocal. It is real / stored: write 1 / scale."
        yield refuse("kv-scale-range", where, text)
    elif scale > _UNUSUAL * limit / _IMPLAUSIBLE:
        text = f"is {scale:.4g}, an unusually large range of keys or values; look at that layer."
        yield warn("kv-scale-large", where, text)
    elif scale < 1e-6:
        text = f"is {scale:.3g}, so nearly every key and value saturates; calibrate again."
        yield refuse("kv-scale-tiny", where, text)


def _check_extras(file: TensorFile, name: str, scale: float) -> Iterator[Finding]:
    """k_, v_ and reciprocal factors that producers write beside it must say the same."""
    prefix = name.removesuffix("kv_cache_scaling_factor")
    parts = [f"{prefix}{part}_cache_scaling_factor" for part in ("k", "v")]
    if all(part in file.header for part in parts):
        merged = max(float(file.tensor(part).max()) for part in parts)
        if abs(merged - scale) > _TOLERANCE * max(merged, scale):
            text = (
                f"is {scale:.5g}, but the k_ and v_ factors beside it merge to {merged:.5g}; make them agree."
            )
            yield refuse("kv-scale-merge", f"{file.path.name}: {name}", text)
    reciprocal = f"{prefix}kv_cache_rcp_scaling_factor"
    if reciprocal in file.header and scale > 0:
        value = float(file.tensor(reciprocal).max())
        if abs(value * scale - 1) > _TOLERANCE:
            text = f"is {value:.5g}, must be 1 / {scale:.5g}; leave it out and the loader computes it."
            yield refuse("kv-scale-reciprocal", f"{file.path.name}: {reciprocal}", text)
