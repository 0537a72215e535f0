"""Second-order information of a linear layer's inputs, and its inverse's Cholesky factor.

H = 2 X^T X / num_tokens in the GPTQ paper; the factor 2 changes nothing and is left out. All modules
that read the same input share one Hessian and one factor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Fractions of the mean of H's diagonal added to it, tried in order until the factorization succeeds.
DAMPING_LADDER = (0.01, 0.03, 0.1, 0.3, 1.0)
_BLOCK_COLUMNS = 512


class HessianAccumulator:
    """Sum of x x^T over tokens, in fp32; products of one batch are summed by the matrix product."""

    def __init__(self, num_columns: int) -> None:
        self.num_tokens = 0
        self._sum = torch.zeros(num_columns, num_columns)

    def add(self, inputs: Tensor) -> None:
        """inputs: [tokens, in] fp32. Only the upper triangle of blocks is computed: the rest mirrors it."""
        self.num_tokens += inputs.shape[0]
        num_columns = self._sum.shape[0]
        for start in range(0, num_columns, _BLOCK_COLUMNS):
            end = min(start + _BLOCK_COLUMNS, num_columns)
            self._sum[start:end, start:].addmm_(inputs[:, start:end].T, inputs[:, start:])

    def mean(self) -> Tensor:
        """[in, in] fp32, symmetric."""
        upper = torch.triu(self._sum)
        full = upper + torch.triu(upper, 1).T
        return full / max(self.num_tokens, 1)


def is_usable(hessian: Tensor) -> bool:
    """Finite, and of inputs that are not all zero."""
    return bool(torch.isfinite(hessian).all()) and float(hessian.diagonal().sum()) > 0


@dataclass(frozen=True, slots=True)
class HessianFactor:
    """upper: [in, in] fp32, the upper Cholesky factor of the damped H's inverse: H^-1 = upper^T upper.

    damping: the fraction of H's mean diagonal that had to be added.
    """

    upper: Tensor
    damping: float


def factorize(hessian: Tensor) -> HessianFactor | None:
    """Factor of the inverse, climbing the damping ladder; None when no rung is enough.

    With P the reversal of order, P H P = L L^T gives H = U U^T for the upper U = P L P, and then
    H^-1 = (U^-1)^T U^-1: one factorization and one triangular inverse, in fp64.
    """
    if not is_usable(hessian):
        return None
    identity = torch.eye(hessian.shape[0], dtype=torch.float64)
    for damping in DAMPING_LADDER:
        lower, info = torch.linalg.cholesky_ex(damped(hessian.double(), damping).flip(0, 1))
        if int(info) != 0:
            continue
        inverse = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True).float()
        if bool(torch.isfinite(inverse).all()) and bool((inverse.diagonal() > 0).all()):
            return HessianFactor(inverse, damping)
    return None


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H with `damping` times its mean diagonal added; a new tensor of the same dtype.

    A dead column (no input ever) gets the mean itself, so that its weights round freely.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    result = hessian.clone()
    result.diagonal().add_(damping * mean + (diagonal == 0) * mean)
    return result
