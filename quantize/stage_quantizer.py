"""One stage's modules quantized together: one Hessian, one factor, rows stacked.

Decides what is done when the numbers are bad: more damping, then plain rounding, each reported.
Not known here: where weights and Hessian come from.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.core.manifest import Fallback
from bitsmith.quantize.awq import search_clips
from bitsmith.quantize.descent import descend
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.gptq import column_order, gptq_quantize
from bitsmith.quantize.hessian import DAMPING_LADDER, HessianFactor, damped, factorize, is_usable
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.qparams import Grid, as_quantized_weight, search_qparams
from bitsmith.quantize.records import ModuleRecord, relative_output_error, weight_sqnr_db
from bitsmith.quantize.rtn import rtn_quantize
from bitsmith.quantize.weight import QuantizedWeight, tensor_sha256

NUM_SWEEPS = 2  # of coordinate descent after GPTQ: most of the gain, about twice the time of GPTQ itself


@dataclass(frozen=True, slots=True)
class QuantizedStage:
    weights: Mapping[str, QuantizedWeight | Int8Weight | Fp8Weight]
    records: Sequence[ModuleRecord]
    fallbacks: Sequence[Fallback]


@dataclass(frozen=True, slots=True)
class _Run:
    """How a stage was quantized. hessian: what errors are measured with, None where there is none.
    start: by the monotonic clock."""

    method: str
    damping: float | None
    hessian: Tensor | None
    start: float


def quantize_by_rtn(weights: Mapping[str, Tensor], grid: Grid) -> QuantizedStage:
    """weights: full module name -> [out, in] fp32."""
    start = time.monotonic()
    quantized = {name: rtn_quantize(weight, grid) for name, weight in weights.items()}
    return _recorded(weights, quantized, _Run("rtn", None, None, start), ())


def quantize_by_gptq(
    weights: Mapping[str, Tensor], hessian: Tensor, grid: Grid, *, act_order: bool
) -> QuantizedStage:
    """weights: full module name -> [out, in] fp32, all reading the input whose Hessian is given."""
    start = time.monotonic()
    stacked = torch.cat(list(weights.values()))
    order = column_order(hessian, act_order)
    factor = factorize(hessian[order][:, order])
    if factor is None:
        result, method, damping = _rounded(stacked, hessian, grid), "rtn", None
    else:
        result, method, damping = (
            compensated(stacked, hessian, (factor, order), grid, num_sweeps=NUM_SWEEPS),
            "gptq",
            factor.damping,
        )
    # Errors mean nothing against a Hessian that is itself not finite.
    measure = hessian if bool(torch.isfinite(hessian).all()) else None
    return _as_stage(weights, result, _Run(method, damping, measure, start), _fallbacks(weights, factor))


def quantize_by_clips(weights: Mapping[str, Tensor], hessian: Tensor, grid: Grid) -> QuantizedStage:
    """AWQ's rounding. weights: full module name -> [out, in] fp32, all reading the input whose Hessian is
    given."""
    start = time.monotonic()
    stacked = torch.cat(list(weights.values()))
    if is_usable(hessian):
        clips = search_clips(stacked, damped(hessian, DAMPING_LADDER[0]), grid)
        result = rtn_quantize(stacked, grid, clips)
        return _as_stage(weights, result, _Run("awq", None, hessian, start), ())
    reason = "the calibration inputs are all zero, or not finite"
    fallbacks = [Fallback(name, "awq", "round to nearest", reason) for name in weights]
    return _as_stage(weights, rtn_quantize(stacked, grid), _Run("rtn", None, None, start), fallbacks)


def _as_stage(
    weights: Mapping[str, Tensor], result: QuantizedWeight, run: _Run, fallbacks: Sequence[Fallback]
) -> QuantizedStage:
    """result: of all modules, rows stacked."""
    parts = _split(result, {name: weight.shape[0] for name, weight in weights.items()})
    return _recorded(weights, parts, run, fallbacks)


def _recorded(
    weights: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedWeight],
    run: _Run,
    fallbacks: Sequence[Fallback],
) -> QuantizedStage:
    seconds = (time.monotonic() - run.start) / len(weights)
    records = [_record(name, weights[name], part, run, seconds) for name, part in quantized.items()]
    return QuantizedStage(quantized, records, fallbacks)


def compensated(
    stacked: Tensor, hessian: Tensor, factored: tuple[HessianFactor, Tensor], grid: Grid, *, num_sweeps: int
) -> QuantizedWeight:
    """GPTQ, then sweeps of descent. stacked: [out, in] fp32. factored: of H in an order of columns."""
    factor, order = factored
    # The damped diagonal: a column that calibration never saw keeps a say in its group's scale.
    regular = damped(hessian, factor.damping)
    qparams = search_qparams(stacked, regular.diagonal(), grid)
    values = gptq_quantize(stacked, factor, order, qparams, grid)
    if num_sweeps:
        values, qparams = descend(stacked, regular, (values, qparams), grid, num_sweeps)
    return as_quantized_weight(values, qparams, grid)


def _rounded(stacked: Tensor, hessian: Tensor, grid: Grid) -> QuantizedWeight:
    """Rounding where no factor could be had; errors still weighted by what is known of the inputs."""
    known = torch.nan_to_num(hessian.diagonal(), nan=0.0, posinf=0.0).clamp(min=0)
    importance = known + (known.mean() if bool(known.any()) else 1.0)
    return rtn_quantize(stacked, grid, search_qparams(stacked, importance, grid))


def _split(weight: QuantizedWeight, rows: Mapping[str, int]) -> dict[str, QuantizedWeight]:
    parts = {}
    start = 0
    for name, num_rows in rows.items():
        part = slice(start, start + num_rows)
        zero_point = None if weight.zero_point is None else weight.zero_point[part].clone()
        parts[name] = QuantizedWeight(
            weight.values[part].clone(),
            weight.scale[part].clone(),
            zero_point,
            weight.num_bits,
            weight.group_size,
        )
        start += num_rows
    return parts


def _record(name: str, weight: Tensor, quantized: QuantizedWeight, run: _Run, seconds: float) -> ModuleRecord:
    real = quantized.dequantize()
    return ModuleRecord(
        name=name,
        method=run.method,
        num_bits=quantized.num_bits,
        group_size=quantized.group_size,
        relative_error=None if run.hessian is None else relative_output_error(weight, real, run.hessian),
        sqnr_db=weight_sqnr_db(weight, real),
        damping=run.damping,
        seconds=round(seconds, 4),
        dequantized_sha256=tensor_sha256(real),
    )


def _fallbacks(weights: Mapping[str, Tensor], factor: HessianFactor | None) -> list[Fallback]:
    if factor is not None and factor.damping == DAMPING_LADDER[0]:
        return []
    asked = f"gptq with damping {DAMPING_LADDER[0]}"
    reason = "the Hessian of the calibration inputs is not positive definite at that damping"
    done = f"gptq with damping {factor.damping}" if factor is not None else "round to nearest"
    if factor is None:
        reason = f"the Hessian cannot be factorized at any damping up to {DAMPING_LADDER[-1]}"
    return [Fallback(name, asked, done, reason) for name in weights]
