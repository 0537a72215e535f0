"""One stage's modules in FP8: weights rounded, and the static scale of the input that they share."""

import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bitsmith.core.granularity import PerChannel, PerTensor
from bitsmith.core.manifest import Fallback
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.fp8_weight import FP8_MAX, Fp8Weight, quantize_fp8
from bitsmith.quantize.input_scale import static_input_scale
from bitsmith.quantize.records import ModuleRecord, weight_sqnr_db
from bitsmith.quantize.stage_quantizer import QuantizedStage
from bitsmith.quantize.weight import tensor_sha256


def input_amax(batches: Iterable[Tensor]) -> float:
    """Largest magnitude of a stage's inputs, 0 for none; NaN where one is."""
    return float(torch.stack([torch.zeros(()), *(inputs.abs().max() for inputs in batches)]).max())


def quantize_by_fp8(
    weights: Mapping[str, Tensor], activations: ActivationScale, amax: float
) -> QuantizedStage:
    """weights: full module name -> [out, in] fp32, all reading one input. amax: of that input, where its
    scale is static; 0 when calibration showed nothing."""
    start = time.monotonic()
    granularity: PerTensor | PerChannel = PerTensor() if activations == "tensor" else PerChannel()
    input_scale: float | None = None
    fallbacks: list[Fallback] = []
    if activations == "tensor":
        input_scale, fallbacks = static_input_scale(weights, amax, FP8_MAX)
    quantized = quantize_fp8(weights, granularity, input_scale)
    seconds = (time.monotonic() - start) / len(weights)
    records = [_record(name, weights[name], weight, seconds) for name, weight in quantized.items()]
    return QuantizedStage(quantized, records, fallbacks)


def _record(name: str, weight: Tensor, quantized: Fp8Weight, seconds: float) -> ModuleRecord:
    real = quantized.dequantize()
    return ModuleRecord(
        name=name,
        method="fp8",
        num_bits=8,
        group_size=quantized.in_features,
        relative_error=None,
        sqnr_db=weight_sqnr_db(weight, real),
        damping=None,
        seconds=round(seconds, 4),
        dequantized_sha256=tensor_sha256(real),
    )
