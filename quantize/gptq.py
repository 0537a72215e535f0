"""GPTQ: columns are rounded one after another, each one's error moved into those that follow.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh: "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers", ICLR 2023; sections named at the loops. A pure function of
tensors: several modules that share inputs are passed as one matrix of stacked rows.
"""

import torch
from torch import Tensor

from bitsmith.quantize.hessian import HessianFactor
from bitsmith.quantize.qparams import Grid, QParams

_NUM_COLUMNS_PER_BLOCK = 64


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
    num_columns = weight.shape[1]
    group_of_column = (order // grid.group_size).tolist()
    # Column-major, so that a column is contiguous: [in, out], rows in `order`.
    remaining = weight.T[order].contiguous()
    scale = qparams.scale.T.contiguous()  # [num_groups, out]
    zero_point = None if qparams.zero_point is None else qparams.zero_point.T.float().contiguous()
    values = torch.empty_like(remaining)
    upper = factor.upper
    # Section 3.3, "lazy batch-updates": inside a block every column updates the block's own rest at
    # once; what lies behind the block is updated by one matrix product.
    for start in range(0, num_columns, _NUM_COLUMNS_PER_BLOCK):
        end = min(start + _NUM_COLUMNS_PER_BLOCK, num_columns)
        errors = torch.empty(end - start, weight.shape[0])
        for column in range(start, end):
            group = group_of_column[column]
            current, column_scale = remaining[column], scale[group]
            levels = torch.div(current, column_scale, out=values[column]).round_()
            if zero_point is not None:
                levels.add_(zero_point[group])
            levels.clamp_(grid.quant_min, grid.quant_max)
            real = (levels if zero_point is None else levels - zero_point[group]) * column_scale
            # Equations 2 and 3 in Cholesky form (section 3.3, step 3): the row of the factor holds
            # what is needed of H^-1 once the columns before are fixed.
            error = torch.sub(current, real, out=errors[column - start]).div_(upper[column, column])
            remaining[column + 1 : end].addr_(upper[column, column + 1 : end], error, alpha=-1)
        remaining[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    result = torch.empty_like(values)
    result[order] = values
    return result.T.to(torch.int8).contiguous()
