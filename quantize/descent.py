"""Coordinate descent on the layer's quadratic loss, over the integers and over the scales.

loss(row) = (w - real)^T H (w - real). Started from any rounding, each step sets one column's integers, or
one group's scale, to the minimum with all else fixed, so the loss never grows. K. Behdin et al.,
"QuantEase: Optimization-based Quantization for Language Models", 2023, section 3 (integers); the step
for scales is the one-dimensional least-squares fit. A pure function of tensors.
"""

import torch
from torch import Tensor

from bitsmith.quantize.qparams import Grid, QParams, stored_scale

_LEAF_COLUMNS = 8  # below this, columns update each other one by one instead of by matrix products


def descend(
    weight: Tensor, hessian: Tensor, start: tuple[Tensor, QParams], grid: Grid, num_sweeps: int
) -> tuple[Tensor, QParams]:
    """Better integers [out, in] int8 and scales. weight: [out, in] fp32; hessian: [in, in], damped.

    Works on columns as rows, [in, out], because one column is what a step touches. `levels` are the
    integers less their zero point: real = levels * scale.
    """
    values, qparams = start
    scale = qparams.scale.T.contiguous()  # [num_groups, out]
    zero_point = torch.zeros_like(scale) if qparams.zero_point is None else qparams.zero_point.T.float()
    offsets = zero_point.repeat_interleave(grid.group_size, dim=0)
    levels = values.T.float() - offsets
    real = levels * scale.repeat_interleave(grid.group_size, dim=0)
    gradient = hessian @ (weight.T - real)  # half of the negative gradient, [in, out]
    for _ in range(num_sweeps):
        for group in range(scale.shape[0]):
            columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
            low, high = grid.quant_min - zero_point[group], grid.quant_max - zero_point[group]
            before = levels[columns] * scale[group]
            inner = hessian[columns, columns].contiguous()
            local = gradient[columns].clone()
            _fit_scale(inner, local, levels[columns], scale[group], grid)
            step = _GroupStep(inner, local, levels[columns], scale[group], (low, high))
            step.sweep(0, grid.group_size)
            gradient.addmm_(hessian[:, columns], levels[columns] * scale[group] - before, alpha=-1)
    values = (levels + offsets).T.to(torch.int8).contiguous()
    return values, QParams(scale.T.contiguous(), qparams.zero_point)


def _fit_scale(hessian: Tensor, gradient: Tensor, levels: Tensor, scale: Tensor, grid: Grid) -> None:
    """Best scale of one group with its levels fixed. hessian: [group_size, group_size];
    gradient, levels: [group_size, out]; gradient and scale [out] are updated in place."""
    pulled = (levels * gradient).sum(dim=0)
    curvature = (levels * (hessian @ levels)).sum(dim=0)
    wanted = stored_scale(scale + pulled / curvature.clamp(min=1e-30), grid)
    change = wanted - scale
    # The stored type rounds the minimum away: keep the old scale where that made it worse.
    gain = change * (2 * pulled - change * curvature)
    change = torch.where((gain > 0) & torch.isfinite(gain), change, 0.0)
    scale += change
    gradient.addmm_(hessian, levels * change, alpha=-1)


class _GroupStep:
    """One pass over the integers of a group, one column after another; everything is updated in place."""

    def __init__(
        self, hessian: Tensor, gradient: Tensor, levels: Tensor, scale: Tensor, limits: tuple[Tensor, Tensor]
    ) -> None:
        self._hessian = hessian
        self._gradient = gradient
        self._levels = levels
        self._scale = scale
        self._low, self._high = limits
        self._steps = torch.empty_like(gradient)
        self._curvature = hessian.diagonal().tolist()

    def sweep(self, start: int, end: int) -> None:
        """Columns start:end; their steps reach one another's gradients but not beyond `end`."""
        if end - start > _LEAF_COLUMNS:
            middle = (start + end) // 2
            self.sweep(start, middle)
            coupling = self._hessian[middle:end, start:middle]
            self._gradient[middle:end].addmm_(coupling, self._steps[start:middle], alpha=-1)
            self.sweep(middle, end)
            return
        for column in range(start, end):
            levels = self._levels[column]
            wanted = self._gradient[column] / (self._curvature[column] * self._scale)
            wanted = wanted.add_(levels).round_().clamp_(self._low, self._high)
            step = torch.sub(wanted, levels, out=self._steps[column]).mul_(self._scale)
            levels.copy_(wanted)
            rest = slice(column + 1, end)
            self._gradient[rest].addr_(self._hessian[column, rest], step, alpha=-1)
