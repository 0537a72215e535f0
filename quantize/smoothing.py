"""Choosing the scales that move between a layer's weights and its inputs.

Column j of the weights is multiplied by s_j and its input divided, which changes nothing before rounding.
Every family of scales here has one strength alpha; alpha 0 is always tried and means s = 1. Pure functions
of tensors. Not known here: which operator's outputs are divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_COARSE_ALPHAS = tuple(step / 10 for step in range(1, 11))
_FINE_STEP = 0.05
_SMALLEST_SHARE = 1e-4  # of the largest magnitude: a channel that calibration hardly saw keeps a finite scale


@dataclass(frozen=True, slots=True)
class Candidate:
    """scale: [num_rows], of the outputs of the operator before. error: of the stage's output."""

    alpha: float
    scale: Tensor
    error: float


class ScaleFamily(Protocol):
    """One way of turning a strength into scales, and the error that judges them."""

    def scale(self, alpha: float) -> Tensor:
        """[num_rows]"""

    def error(self, scale: Tensor) -> float:
        """Of the stage's output with these scales, [num_rows]."""


def search_alpha(family: ScaleFamily, representable: Callable[[Tensor], Tensor]) -> Candidate:
    """The strength of least error: steps of 0.1 in [0, 1], then half a step to both sides of the best.

    representable: the nearest scales that can be folded exactly; these are the ones that are judged.
    """
    ones = torch.ones_like(family.scale(0.0))
    best = Candidate(0.0, ones, family.error(ones))

    def better(best: Candidate, alphas: Sequence[float]) -> Candidate:
        for alpha in alphas:
            scale = representable(family.scale(alpha))
            error = family.error(scale)
            if error < best.error:
                best = Candidate(alpha, scale, error)
        return best

    best = better(best, _COARSE_ALPHAS)
    fine = (best.alpha - _FINE_STEP, best.alpha + _FINE_STEP)
    return better(best, [round(alpha, 2) for alpha in fine if 0 < alpha < 1])


def centred(scale: Tensor) -> Tensor:
    """Scales around one, so that neither weights nor inputs grow out of range."""
    return scale / (scale.max() * scale.min()).sqrt()


def bounded(magnitude: Tensor) -> Tensor:
    """Magnitudes without zeros."""
    return magnitude.clamp(min=float(magnitude.max()) * _SMALLEST_SHARE)


def mean_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Mean over the columns that one row feeds: [in] -> [num_rows]. A row that feeds none gets one."""
    sums = torch.zeros(num_rows).index_add_(0, rows, values)
    counts = torch.zeros(num_rows).index_add_(0, rows, torch.ones_like(values))
    return torch.where(counts > 0, sums / counts.clamp(min=1), 1.0)


def output_error(error: Tensor, hessian: Tensor) -> float:
    """Mean over tokens of ||error x||^2 = tr(error H error^T). error: [out, in]; hessian: [in, in]."""
    return float(((error @ hessian) * error).double().sum())
