"""Values of one rank file: finite numbers, and scales in the range and the convention that the loader wants.

All scales multiply: real = stored * scale. The limits are chosen so that a reciprocal falls outside them
while any weights or activations a model can have stay inside. They hold for a tensor's median: smoothing and
AWQ move the size of single input channels into single weights, whose scales may be large.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bitsmith.compile.tensor_file import TensorFile
from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_quantization import (
    FP8,
    FP8_ROWWISE,
    SQ_PER_CHANNEL,
    W4A8_AWQ,
    W4A16_AWQ,
)

# Suffix -> (largest plausible scale, what it scales): no weights beyond 448, no activations beyond fp16.
_LIMITS = {
    "weights_scaling_factor": (1.0, "weights"),
    "weights_scaling_factor_2": (1.0, "weights"),
    "per_channel_scale": (1.0, "weights"),
    "per_token_scale": (1.0, "weights"),
    "activation_scaling_factor": (100.0, "activations"),
    "act_scale": (500.0, "activations"),
}
_PRE_QUANT_RANGE = (1e-4, 1e4)
_MIN_CODE = {W4A16_AWQ: 4, W4A8_AWQ: 4, SQ_PER_CHANNEL: 64}  # what the largest integer must reach


def check_values(model: EngineModel, file: TensorFile) -> Iterator[Finding]:
    """Every tensor of the file is read once."""
    for name, (dtype, _) in file.header.items():
        where = f"{file.path.name}: {name}"
        tensor = file.tensor(name)
        if tensor.numel() == 0:
            continue
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            text = "has values that are not finite; quantize again and look at that layer's calibration."
            yield refuse("not-finite", where, text)
            continue
        yield from _check_tensor(model, name, tensor, where)
        if name.endswith(".weight") and ".layers." in name and "norm" not in name:
            yield from _check_codes(model, tensor, dtype, where)


def _check_tensor(model: EngineModel, name: str, tensor: Tensor, where: str) -> Iterator[Finding]:
    suffix = name.rpartition(".")[2]
    if suffix in _LIMITS:
        yield from _check_scale(suffix, tensor.float(), where)
    elif suffix == "prequant_scaling_factor":
        yield from _check_pre_quant(tensor.float(), where)
    elif ("norm" in name and suffix == "weight") or name == "transformer.ln_f.weight":
        yield from _check_norm(model, tensor.float(), where)
    elif suffix == "weight" and "embedding" in name and not bool(tensor.any()):
        yield refuse("all-zero", where, "is all zero; export it again.")


def _check_scale(suffix: str, scale: Tensor, where: str) -> Iterator[Finding]:
    limit, what = _LIMITS[suffix]
    if bool((scale < 0).any()):
        yield refuse(
            "scale-negative", where, "has negative scales; a scale is amax divided by the grid's end."
        )
    elif bool((scale == 0).any()):
        text = f"has a scale of zero, which makes those {what} zero; calibrate again or write a small scale."
        yield refuse("scale-zero", where, text)
    elif float(scale.median()) > limit:
        text = (
            f"is {float(scale.median()):.4g}, more than any {what} need; it looks like a reciprocal, and "
            "TensorRT-LLM wants real / stored: write 1 / scale."
        )
        yield refuse("scale-range", where, text)
    elif float(scale.max()) > limit:
        yield warn("scale-large", where, large_scale(scale, what))
    elif float(scale.min()) < 1e-12:
        text = f"is {float(scale.min()):.3g}, too small for any {what}; calibrate again."
        yield refuse("scale-tiny", where, text)


def large_scale(scale: Tensor, what: str) -> str:
    """What to say of a tensor in which some scales are large, and most are not."""
    return (
        f"reaches {float(scale.max()):.4g}, its median being {float(scale.median()):.4g}: a few {what} are "
        "very large, as scales folded into weights make them; compare with --source if nothing was folded."
    )


def _check_pre_quant(scale: Tensor, where: str) -> Iterator[Finding]:
    low, high = _PRE_QUANT_RANGE
    if bool((scale <= 0).any()):
        text = "must be positive: inputs are multiplied by it; write ones where no scale is wanted."
        yield refuse("pre-quant-range", where, text)
    elif float(scale.min()) < low or float(scale.max()) > high:
        text = f"reaches from {float(scale.min()):.3g} to {float(scale.max()):.3g}; check the smoothing."
        yield warn("pre-quant-range", where, text)


def _check_norm(model: EngineModel, weight: Tensor, where: str) -> Iterator[Finding]:
    if not bool(weight.any()):
        hint = "add 1 to every Gemma norm" if model.is_gemma else "export it again"
        yield refuse("norm-zero", where, f"is all zero; {hint}.")


def _check_codes(model: EngineModel, weight: Tensor, dtype: str, where: str) -> Iterator[Finding]:
    """Stored numbers must use the grid: a scale far too large leaves most of it unused."""
    algo = model.quant.quant_algo
    if dtype in ("float8_e4m3fn", "int8") and algo in (FP8, FP8_ROWWISE):
        codes = weight.view(torch.float8_e4m3fn).float().abs()
        largest = codes.amax(dim=1).min() if algo == FP8_ROWWISE else codes.max()
        if model.tp_size == 1 and 0 < float(largest) < 224:
            yield warn(
                "grid-unused", where, f"reaches only {float(largest):g} of 448: its scale is too large."
            )
    elif algo in _MIN_CODE and dtype in ("int8", "uint8"):
        stored = weight.view(torch.uint8)
        codes = weight if algo == SQ_PER_CHANNEL else ((stored & 0xF).view(torch.int8) ^ 8) - 8
        largest_code = int(codes.to(torch.int16).abs().max())
        if 0 < largest_code < _MIN_CODE[algo]:
            text = f"reaches only {largest_code} of its integer range: its scales are too large."
            yield warn("grid-unused", where, text)
    if not bool(weight.view(torch.uint8).any()):
        yield refuse("all-zero", where, "is all zero; export it again.")
