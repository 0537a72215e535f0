"""Coordinate descent on the layer's quadratic loss, over the integers and over the scales.

loss(row) = (w - real)^T H (w - real). Started from any rounding, each step sets one column's integers, or
one group's scale, to the minimum with all else fixed, so the loss never grows. K. Behdin et al.,
"QuantEase: Optimization-based Quantization for Language Models", 2023, section 3 (integers); the step
for scales is the one-dimensional least-squares fit. A pure function of tensors.
"""

import torch
from torch import Tensor

from bitsmith.quantize.qparams import Grid, QParams, stored_scale

_NUM_COLUMNS_PER_BLOCK = 64


def descend(
    weight: Tensor, hessian: Tensor, start: tuple[Tensor, QParams], grid: Grid, num_sweeps: int
) -> tuple[Tensor, QParams]:
    """Better integers [out, in] int8 and scales. weight: [out, in] fp32; hessian: [in, in], damped.

    Works on columns as rows, [in, out], because one column is what a step touches.
    """
    values, qparams = start
    zero_point = None if qparams.zero_point is None else qparams.zero_point.T.float()
    levels = values.T.float()  # [in, out]
    if zero_point is not None:
        levels = levels - zero_point.repeat_interleave(grid.group_size, dim=0)
    scale = qparams.scale.T.contiguous()  # [num_groups, out]
    target = weight.T.contiguous()
    for _ in range(num_sweeps):
        real = levels * scale.repeat_interleave(grid.group_size, dim=0)
        gradient = hessian @ (target - real)  # [in, out], half of the negative gradient
        _sweep_scales(hessian, gradient, levels, scale, grid)
        _sweep_levels(hessian, gradient, levels, (scale, zero_point), grid)
    if zero_point is not None:
        levels = levels + zero_point.repeat_interleave(grid.group_size, dim=0)
    return levels.T.to(torch.int8).contiguous(), QParams(scale.T.contiguous(), qparams.zero_point)


def _sweep_levels(
    hessian: Tensor, gradient: Tensor, levels: Tensor, grid_of_group: tuple[Tensor, Tensor | None], grid: Grid
) -> None:
    """One pass over the columns; `levels` [in, out] and `gradient` are updated in place."""
    scale, zero_point = grid_of_group
    num_columns, num_rows = levels.shape
    curvature = hessian.diagonal().tolist()
    for start in range(0, num_columns, _NUM_COLUMNS_PER_BLOCK):
        end = min(start + _NUM_COLUMNS_PER_BLOCK, num_columns)
        steps = torch.empty(end - start, num_rows)
        for column in range(start, end):
            group = column // grid.group_size
            offset = 0.0 if zero_point is None else zero_point[group]
            wanted = levels[column] + gradient[column] / (curvature[column] * scale[group])
            wanted = (wanted + offset).round_().clamp_(grid.quant_min, grid.quant_max) - offset
            step = torch.sub(wanted, levels[column], out=steps[column - start]).mul_(scale[group])
            levels[column] = wanted
            gradient[column:end].addr_(hessian[column, column:end], step, alpha=-1)
        gradient[end:].addmm_(hessian[end:, start:end], steps, alpha=-1)


def _sweep_scales(hessian: Tensor, gradient: Tensor, levels: Tensor, scale: Tensor, grid: Grid) -> None:
    """One pass over the groups; `scale` [num_groups, out] and `gradient` are updated in place."""
    for group in range(scale.shape[0]):
        columns = slice(group * grid.group_size, (group + 1) * grid.group_size)
        direction = levels[columns]
        pulled = (direction * gradient[columns]).sum(dim=0)
        curvature = (direction * (hessian[columns, columns] @ direction)).sum(dim=0)
        wanted = stored_scale(scale[group] + pulled / curvature.clamp(min=1e-30), grid)
        change = wanted - scale[group]
        # The stored type rounds the minimum away: keep the old scale where that made it worse.
        gain = change * (2 * pulled - change * curvature)
        change = torch.where((gain > 0) & torch.isfinite(wanted), change, torch.zeros_like(change))
        scale[group] += change
        gradient.addmm_(hessian[:, columns], direction * change, alpha=-1)
