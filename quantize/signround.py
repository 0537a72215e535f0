"""Learned rounding of one weight matrix: an offset for every integer, a factor for every scale.

W. Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs"
(SignRound), 2023, section 3. There the start is plain rounding; here it is any quantized weight, so that
learning begins where a compensating method ended. Pure tensors: where gradients come from is not known here.
"""

import torch
from torch import Tensor

from bitsmith.quantize.qparams import Grid, QParams, as_quantized_weight, stored_scale
from bitsmith.quantize.weight import QuantizedWeight

# How far an untouched integer leans towards the weight that it stands for, as a share of the real distance: a
# compensating method leaves many integers farther from it than half a level, and those must not fall at once.
_LEAN = 0.8
# Offsets and scales move by at most half of these shares over all steps. Eight times as fast, 50 steps
# spoiled a layer that GPTQ had compensated: its errors cancel one another, which many changes at once undo.
_OFFSET_RATE = 0.25
_SCALE_RATE = 0.04


class LearnedRounding:
    """weight: [out, in] fp32, what is approximated. start: the quantized weight that learning begins with."""

    def __init__(self, weight: Tensor, start: QuantizedWeight) -> None:
        self._start = start
        self._grid = Grid(start.num_bits, start.group_size, start.is_symmetric, start.scale.dtype)
        shape = (start.out_features, start.num_groups, start.group_size)
        self._scale = start.scale.float().unsqueeze(2)  # [out, num_groups, 1]
        zero_point = torch.zeros_like(self._scale)
        self._zero_point = zero_point if start.zero_point is None else start.zero_point.float().unsqueeze(2)
        levels = start.values.float().view(shape)
        distance = weight.view(shape) / self._scale + self._zero_point - levels
        self._position = levels + _LEAN * distance.clamp(-0.5, 0.5)  # rounds to `levels`
        self._lowest, self._highest = self._position - 0.5, self._position + 0.5
        self._factor = torch.ones_like(self._scale)

    def real(self) -> Tensor:
        """[out, in] fp32: the weight that the present offsets and factors give."""
        return ((self._levels() - self._zero_point) * self._stored_scale()).flatten(1)

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """One signed step (equation 5). gradient: [out, in], of the loss by `real()`.

        Rounding passes the gradient straight through. The scale's gradient is the exact one, integers fixed.
        """
        grouped = gradient.view(self._position.shape)
        slope = (grouped * (self._levels() - self._zero_point)).sum(dim=2, keepdim=True) * self._scale
        self._factor.sub_(slope.sign_(), alpha=learning_rate * _SCALE_RATE)
        # The offset of equation 3, in [-0.5, 0.5], is the distance from where the position began.
        self._position.sub_((grouped * self._scale.sign()).sign_(), alpha=learning_rate * _OFFSET_RATE)
        torch.minimum(torch.maximum(self._position, self._lowest), self._highest, out=self._position)

    def quantized(self) -> QuantizedWeight:
        values = self._levels().flatten(1).to(torch.int8)
        qparams = QParams(self._stored_scale().squeeze(2), self._start.zero_point)
        return as_quantized_weight(values, qparams, self._grid)

    def _levels(self) -> Tensor:
        return self._position.round().clamp_(self._grid.quant_min, self._grid.quant_max)

    def _stored_scale(self) -> Tensor:
        return stored_scale(self._scale * self._factor, self._grid)
