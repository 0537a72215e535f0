"""One stage's modules in INT8: weights rounded per output channel, and the scale of the input they share."""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from bitsmith.core.manifest import Fallback
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.input_range import InputRange
from bitsmith.quantize.input_scale import static_input_scale
from bitsmith.quantize.int8_weight import INT8_MAX, Int8Weight, round_inputs
from bitsmith.quantize.qparams import Grid
from bitsmith.quantize.records import ModuleRecord, weight_sqnr_db
from bitsmith.quantize.rtn import rtn_quantize
from bitsmith.quantize.stage_quantizer import QuantizedStage
from bitsmith.quantize.weight import tensor_sha256


def quantize_by_int8(
    weights: Mapping[str, Tensor],
    inputs: InputRange,
    activations: ActivationScale,
    scale_dtype: torch.dtype,
) -> QuantizedStage:
    """weights: full module name -> [out, in] fp32, all reading one input. inputs: empty where there are
    none."""
    start = time.monotonic()
    input_scale: float | None = None
    fallbacks: list[Fallback] = []
    if activations == "tensor":
        input_scale, fallbacks = static_input_scale(weights, float(inputs.amax.max()), INT8_MAX)
    quantized = {}
    for name, weight in weights.items():
        grid = Grid(8, weight.shape[1], True, scale_dtype, signed_scale=False)
        quantized[name] = Int8Weight(rtn_quantize(weight, grid), input_scale)
    seconds = (time.monotonic() - start) / len(weights)
    records = [_record(name, weights[name], part, inputs, seconds) for name, part in quantized.items()]
    return QuantizedStage(quantized, records, fallbacks)


def _record(
    name: str, weight: Tensor, quantized: Int8Weight, inputs: InputRange, seconds: float
) -> ModuleRecord:
    real = quantized.dequantize()
    return ModuleRecord(
        name=name,
        method="int8",
        num_bits=8,
        group_size=quantized.in_features,
        relative_error=_relative_error(weight, real, inputs.sample, quantized.input_scale),
        sqnr_db=weight_sqnr_db(weight, real),
        damping=None,
        seconds=round(seconds, 4),
        dequantized_sha256=tensor_sha256(real),
    )


def _relative_error(weight: Tensor, real: Tensor, sample: Tensor, input_scale: float | None) -> float | None:
    """||round(X) real^T - X weight^T|| / ||X weight^T||; None where the outputs are all zero."""
    expected = sample @ weight.T
    signal = float(expected.double().square().sum())
    if signal == 0:
        return None
    lost = round_inputs(sample, input_scale) @ real.T - expected
    return math.sqrt(float(lost.double().square().sum()) / signal)
