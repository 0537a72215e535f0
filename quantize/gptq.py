"""GPTQ: columns are rounded one after another, each one's error moved into those that follow.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh: "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", ICLR 2023; sections named at the loops. A pure function of
tensors: several modules that share inputs are passed as one matrix of stacked rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.quantize.hessian import HessianFactor
from bitsmith.quantize.qparams import Grid, QParams

_LEAF_COLUMNS = 8  # below this, columns update each other one by one instead of by matrix products


def column_order(hessian: Tensor, act_order: bool) -> Tensor:
    """Order in which columns are rounded: as they stand, or by falling diagonal of H (act-order).

    Groups are fixed before (static groups), so that the stored layout does not change with the order.
    """
    if act_order:
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return torch.arange(hessian.shape[0])


def gptq_quantize(
    weight: Tensor, factor: HessianFactor, order: Tensor, qparams: QParams, grid: Grid
) -> Tensor:
    """Integers [out, in] int8. weight: [out, in] fp32; factor: of H with rows and columns in `order`."""
    remaining = weight.T[order].contiguous()
    zero_point = None if qparams.zero_point is None else qparams.zero_point.T.float().contiguous()
    work = _Work(
        upper=factor.upper,
        remaining=remaining,
        errors=torch.empty_like(remaining),
        values=torch.empty_like(remaining),
        scale=qparams.scale.T.contiguous(),
        zero_point=zero_point,
        group_of_column=(order // grid.group_size).tolist(),
    )
    _round_columns(work, grid, 0, weight.shape[1])
    result = torch.empty_like(work.values)
    result[order] = work.values
    return result.T.to(torch.int8).contiguous()


@dataclass(frozen=True, slots=True)
class _Work:
    """Column-major, so that a column is contiguous: [in, out], rows in rounding order.

    upper: [in, in]. remaining: the weights with the errors so far moved in. scale, zero_point:
    [num_groups, out].
    """

    upper: Tensor
    remaining: Tensor
    errors: Tensor
    values: Tensor
    scale: Tensor
    zero_point: Tensor | None
    group_of_column: list[int]


def _round_columns(work: _Work, grid: Grid, start: int, end: int) -> None:
    """Round columns start:end, moving their errors into one another but not beyond `end`.

    Section 3.3, "lazy batch-updates", taken to its end: halves of halves, so that nearly all updates are
    matrix products of blocks that fit some level of cache.
    """
    if end - start > _LEAF_COLUMNS:
        middle = (start + end) // 2
        _round_columns(work, grid, start, middle)
        moved = work.upper[start:middle, middle:end].T
        work.remaining[middle:end].addmm_(moved, work.errors[start:middle], alpha=-1)
        _round_columns(work, grid, middle, end)
        return
    for column in range(start, end):
        _round_column(work, grid, column)
        row = work.upper[column, column + 1 : end]
        work.remaining[column + 1 : end].addr_(row, work.errors[column], alpha=-1)


def _round_column(work: _Work, grid: Grid, column: int) -> None:
    group = work.group_of_column[column]
    current, scale = work.remaining[column], work.scale[group]
    levels = torch.div(current, scale, out=work.values[column]).round_()
    if work.zero_point is not None:
        levels.add_(work.zero_point[group])
    levels.clamp_(grid.quant_min, grid.quant_max)
    real = (levels if work.zero_point is None else levels - work.zero_point[group]) * scale
    # Equations 2 and 3 in Cholesky form (section 3.3, step 3): the row of the factor holds what is
    # needed of H^-1 once the columns before are fixed.
    torch.sub(current, real, out=work.errors[column]).div_(work.upper[column, column])
