"""SmoothQuant: outliers of the inputs are moved into the weights, which have none.

G. Xiao, J. Lin, M. Seznec, H. Wu, J. Demouth, S. Han: "SmoothQuant: Accurate and Efficient Post-Training
Quantization for Large Language Models", ICML 2023; sections named at the formulas. There one strength serves
all layers; here each stage has its own, and none at all is a candidate. Pure functions of tensors.
"""

import torch
from torch import Tensor

from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.input_range import InputRange
from bitsmith.quantize.int8_weight import INT8_MAX, round_inputs
from bitsmith.quantize.qparams import Grid, choose_qparams, quantize
from bitsmith.quantize.smoothing import bounded, centred


class SmoothQuantFamily:
    """Section 4, equation 4: s_j = max|X_j|^alpha / max|W_j|^(1 - alpha).

    In the paper inputs are divided by s; so are they here. Judged by the stage's output on a sample of its
    inputs, with weights and inputs rounded. weight: [out, in] fp32, all modules of the stage stacked.
    rows: [in], which of the num_rows outputs of the operator before feeds each column.
    """

    def __init__(
        self, weight: Tensor, inputs: InputRange, activations: ActivationScale, rows: Tensor, num_rows: int
    ) -> None:
        self._weight = weight
        self._inputs = inputs
        self._is_static = activations == "tensor"
        self._rows = rows
        self._input_amax = bounded(_amax_by_row(inputs.amax, rows, num_rows))
        self._weight_amax = bounded(_amax_by_row(weight.abs().amax(dim=0), rows, num_rows))
        self._expected = inputs.sample @ weight.T

    def scale(self, alpha: float) -> Tensor:
        return centred(self._input_amax.pow(alpha) / self._weight_amax.pow(1 - alpha))

    def error(self, scale: Tensor) -> float:
        columns = scale[self._rows]
        scaled, grid = self._weight * columns, Grid(8, self._weight.shape[1], True, signed_scale=False)
        rounded = quantize(scaled, choose_qparams(scaled, grid), grid).dequantize()
        input_scale = None
        if self._is_static:
            input_scale = float((self._inputs.amax / columns).max()) / INT8_MAX
        output = round_inputs(self._inputs.sample / columns, input_scale) @ rounded.T
        return float((output - self._expected).double().square().sum())


def _amax_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Largest over the columns that one row feeds: [in] -> [num_rows]."""
    return torch.zeros(num_rows).scatter_reduce_(0, rows, values, "amax")
