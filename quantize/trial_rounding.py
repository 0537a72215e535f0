"""Rounding on trial: how well a scheme's method could do on a grid, for a share of the time that it takes."""

from collections.abc import Callable

from torch import Tensor

from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.awq import search_clips
from bitsmith.quantize.gptq import column_order
from bitsmith.quantize.hessian import DAMPING_LADDER, damped, factorize, is_usable
from bitsmith.quantize.qparams import Grid
from bitsmith.quantize.rtn import rtn_quantize
from bitsmith.quantize.stage_quantizer import compensated
from bitsmith.quantize.weight import QuantizedWeight

TrialRounding = Callable[[Grid], QuantizedWeight]


def trial_rounding(scheme: QuantizationScheme, weight: Tensor, hessian: Tensor) -> TrialRounding:
    """weight: [out, in] fp32, the modules of one input stacked. hessian: of that input, [in, in].

    GPTQ without the descent that follows it, one factor for all grids; AWQ's clips without its scales, which
    differ by grid only a little. Where the Hessian is of no use, plain rounding, as in earnest.
    """
    if scheme.uses_gptq:
        order = column_order(hessian, scheme.act_order is True)
        factor = factorize(hessian[order][:, order])
        if factor is not None:
            return lambda grid: compensated(weight, hessian, (factor, order), grid, num_sweeps=0)
    if scheme.method == "awq" and is_usable(hessian):
        regular = damped(hessian, DAMPING_LADDER[0])
        return lambda grid: rtn_quantize(weight, grid, search_clips(weight, regular, grid))
    return lambda grid: rtn_quantize(weight, grid)
