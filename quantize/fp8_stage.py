"""One stage's modules in FP8: weights rounded, and the static scale of the input that they share."""

import math
import time
from collections.abc import Iterable, Mapping

from torch import Tensor

from bitsmith.core.errors import WorkFailed
from bitsmith.core.granularity import PerChannel, PerTensor
from bitsmith.core.manifest import Fallback
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.fp8_weight import FP8_MAX, Fp8Weight, quantize_fp8
from bitsmith.quantize.records import ModuleRecord, weight_sqnr_db
from bitsmith.quantize.stage_quantizer import QuantizedStage
from bitsmith.quantize.weight import tensor_sha256


def input_amax(batches: Iterable[Tensor]) -> float:
    """Largest magnitude of a stage's inputs. Raises WorkFailed when one is not finite."""
    largest = [float(inputs.abs().max()) for inputs in batches]
    if not all(map(math.isfinite, largest)):
        raise WorkFailed(
            "The calibration activations are not finite: the model overflows on the calibration data. "
            "Check its weights, or calibrate on other text."
        )
    return max(largest, default=0.0)


def quantize_by_fp8(
    weights: Mapping[str, Tensor], activations: ActivationScale, amax: float
) -> QuantizedStage:
    """weights: full module name -> [out, in] fp32, all reading one input. amax: of that input, where its
    scale is static; 0 when calibration showed nothing."""
    start = time.monotonic()
    granularity: PerTensor | PerChannel = PerTensor() if activations == "tensor" else PerChannel()
    input_scale, fallbacks = None, []
    if activations == "tensor":
        input_scale = amax / FP8_MAX if amax > 0 else 1.0
        if amax == 0:
            reason = "calibration gave this module no input, or nothing but zeros"
            fallbacks = [Fallback(name, "calibrated input scale", "scale 1", reason) for name in weights]
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
