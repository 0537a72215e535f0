"""AWQ: weights that large inputs meet are scaled up before rounding, so that they lose less.

J. Lin, J. Tang, H. Tang, S. Yang, W.-M. Chen, W.-C. Wang, G. Xiao, X. Dang, C. Gan, S. Han: "AWQ:
Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration", MLSys 2024; sections
named at the formulas. Pure functions of tensors.
"""

import torch
from torch import Tensor

from bitsmith.quantize.qparams import Grid, QParams, choose_qparams, quantize, search_qparams
from bitsmith.quantize.smoothing import bounded, centred, mean_by_row, output_error


class AwqFamily:
    """Section 3.2, equation 5: s = s_X^alpha, with s_X the mean magnitude of each input channel.

    Judged by equation 4, ||Q(W diag(s)) diag(s)^-1 X - W X||^2, evaluated as tr(E H E^T): the layer need
    not run. weight: [out, in] fp32, all modules of the stage stacked. hessian: [in, in]. rows: [in], which
    of the num_rows outputs of the operator before feeds each column.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, magnitude: Tensor, rows: Tensor, num_rows: int, grid: Grid
    ) -> None:
        self._weight = weight
        self._hessian = hessian
        self._magnitude = bounded(mean_by_row(magnitude, rows, num_rows))
        self._rows = rows
        self._grid = grid

    def scale(self, alpha: float) -> Tensor:
        return centred(self._magnitude.pow(alpha))

    def error(self, scale: Tensor) -> float:
        columns = scale[self._rows]
        scaled = self._weight * columns
        rounded = quantize(scaled, choose_qparams(scaled, self._grid), self._grid).dequantize()
        return output_error(rounded / columns - self._weight, self._hessian)


def search_clips(weight: Tensor, hessian: Tensor, grid: Grid) -> QParams:
    """The weight clipping of section 3.2, group by group.

    Judged by the error of each group's own part of the output: e H_gg e^T with H_gg the group's block of H.
    weight: [out, in] fp32; hessian: [in, in].
    """
    blocks = [
        hessian[start : start + grid.group_size, start : start + grid.group_size]
        for start in range(0, hessian.shape[0], grid.group_size)
    ]
    return search_qparams(weight, torch.stack(blocks), grid)
