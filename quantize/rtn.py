"""Round to nearest: no calibration data, no compensation."""

from torch import Tensor

from bitsmith.quantize.qparams import Grid, QParams, choose_qparams, quantize
from bitsmith.quantize.weight import QuantizedWeight


def rtn_quantize(weight: Tensor, grid: Grid, qparams: QParams | None = None) -> QuantizedWeight:
    """weight: [out, in] fp32. qparams: those to round with; by default each group's full range."""
    return quantize(weight, choose_qparams(weight, grid) if qparams is None else qparams, grid)
