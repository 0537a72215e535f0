"""Scales and zero points of a weight matrix, and rounding to the grid they span.

Pure functions of tensors. Weights are grouped along the input axis: [out, in] is seen as
[out, num_groups, group_size]. Not known here: models, files, second-order information across groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.quantize.weight import SMALLEST_SCALE, QuantizedWeight, integer_range

# Clip ratios tried by the search: 1 keeps the largest weight on the grid, less clips it.
_CLIP_RATIOS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6)
_ELEMENTS_PER_PASS = 1 << 15  # so that a pass over all candidates stays in the processor's cache


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that integers live on. scale_dtype: the type in which scales are stored.

    signed_scale: a symmetric scale may be negative, where its readers take one.
    """

    num_bits: int
    group_size: int
    symmetric: bool
    scale_dtype: torch.dtype = torch.float32
    signed_scale: bool = True

    @property
    def quant_min(self) -> int:
        return integer_range(self.num_bits)[0]

    @property
    def quant_max(self) -> int:
        return integer_range(self.num_bits)[1]


@dataclass(frozen=True, slots=True)
class QParams:
    """scale: [out, num_groups] fp32 holding values of the stored type; never zero. zero_point: the same
    shape, int8, or None. A symmetric scale may be negative, which puts the longer side of the signed
    range (-8 of -8..7) under a positive extreme."""

    scale: Tensor
    zero_point: Tensor | None


def choose_qparams(weight: Tensor, grid: Grid) -> QParams:
    """Range of each group taken as it is: no search. weight: [out, in] fp32."""
    grouped = _grouped(weight, grid)
    if grid.symmetric:
        span = (grid.quant_max - grid.quant_min) / 2
        return QParams(stored_scale(grouped.abs().amax(dim=2) / span, grid), None)
    low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    return _affine_qparams(low, high, grid)


def search_qparams(weight: Tensor, importance: Tensor, grid: Grid) -> QParams:
    """For each group the clip (and, if symmetric, the sign of the scale) of least weighted squared error.

    weight: [out, in] fp32. importance: [in], non-negative, the cost of a squared error in each column; or
    [num_groups, group_size, group_size], for each group the matrix of the cost e importance e^T.
    The unclipped range is always a candidate, so that the search is never worse than `choose_qparams`.
    """
    rows_per_pass = max(1, _ELEMENTS_PER_PASS // weight.shape[1])
    parts = [_search_rows(rows, importance, grid) for rows in torch.split(weight, rows_per_pass)]
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    scale = torch.cat([part.scale for part in parts])
    return QParams(scale, torch.cat(zero_points) if zero_points else None)


def _search_rows(weight: Tensor, importance: Tensor, grid: Grid) -> QParams:
    grouped = _grouped(weight, grid)
    group_importance = importance if importance.dim() == 3 else importance.view(-1, grid.group_size)
    best = choose_qparams(weight, grid)
    best_error = _group_error(grouped, best, group_importance, grid)
    for candidate in _candidates(grouped, grid):
        error = _group_error(grouped, candidate, group_importance, grid)
        best = _choose(error < best_error, candidate, best)
        best_error = torch.minimum(error, best_error)
    return best


def quantize(weight: Tensor, qparams: QParams, grid: Grid) -> QuantizedWeight:
    """Round to nearest. weight: [out, in] fp32."""
    grouped = _grouped(weight, grid)
    values = _round_to_grid(grouped, qparams, grid).flatten(1).to(torch.int8)
    return as_quantized_weight(values, qparams, grid)


def _grouped(weight: Tensor, grid: Grid) -> Tensor:
    """[out, in] -> [out, num_groups, group_size]."""
    return weight.reshape(weight.shape[0], -1, grid.group_size)


def as_quantized_weight(values: Tensor, qparams: QParams, grid: Grid) -> QuantizedWeight:
    """values: [out, in] int8, already on the grid."""
    scale = qparams.scale.to(grid.scale_dtype)
    return QuantizedWeight(values, scale, qparams.zero_point, grid.num_bits, grid.group_size)


def stored_scale(scale: Tensor, grid: Grid) -> Tensor:
    """The scale as the stored type holds it, in fp32; zeros and underflow become a tiny positive number."""
    largest = torch.finfo(grid.scale_dtype).max
    rounded = scale.clamp(-largest, largest).to(grid.scale_dtype).float()
    smallest = max(SMALLEST_SCALE, torch.finfo(grid.scale_dtype).tiny)
    return torch.where(rounded.abs() < smallest, smallest, rounded)


def _affine_qparams(low: Tensor, high: Tensor, grid: Grid) -> QParams:
    """low <= 0 <= high: [out, num_groups]."""
    scale = stored_scale((high - low) / (grid.quant_max - grid.quant_min), grid)
    zero_point = (grid.quant_min - low / scale).round().clamp(grid.quant_min, grid.quant_max)
    return QParams(scale, zero_point.to(torch.int8))


def _candidates(grouped: Tensor, grid: Grid) -> list[QParams]:
    """grouped: [out, num_groups, group_size]."""
    if not grid.symmetric:
        low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
        return [_affine_qparams(low * ratio, high * ratio, grid) for ratio in _CLIP_RATIOS]
    largest = grouped.abs().amax(dim=2)
    signs = (-1.0, 1.0) if grid.signed_scale else (1.0,)
    return [
        QParams(stored_scale(largest * (sign * ratio / -grid.quant_min), grid), None)
        for ratio in _CLIP_RATIOS
        for sign in signs
    ]


def _round_to_grid(grouped: Tensor, qparams: QParams, grid: Grid) -> Tensor:
    levels = (grouped / qparams.scale.unsqueeze(2)).round_()
    if qparams.zero_point is not None:
        levels += qparams.zero_point.unsqueeze(2)
    return levels.clamp_(grid.quant_min, grid.quant_max)


def _group_error(grouped: Tensor, qparams: QParams, importance: Tensor, grid: Grid) -> Tensor:
    """[out, num_groups]: weighted squared error of rounding. importance: [num_groups, group_size], or
    [num_groups, group_size, group_size]."""
    real = _round_to_grid(grouped, qparams, grid)
    if qparams.zero_point is not None:
        real -= qparams.zero_point.unsqueeze(2)
    real *= qparams.scale.unsqueeze(2)
    error = real.sub_(grouped)
    if importance.dim() == 2:
        return error.square_().mul_(importance).sum(dim=2)
    by_group = error.transpose(0, 1)
    return (by_group @ importance).mul_(by_group).sum(dim=2).T


def _choose(mask: Tensor, first: QParams, second: QParams) -> QParams:
    scale = torch.where(mask, first.scale, second.scale)
    if first.zero_point is None or second.zero_point is None:
        return QParams(scale, None)
    return QParams(scale, torch.where(mask, first.zero_point, second.zero_point))
