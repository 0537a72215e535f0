"""What is kept of a stage's inputs while calibration batches pass: sums and maxima, never the inputs."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bitsmith.quantize.hessian import HessianAccumulator, is_usable


class InputStatistics:
    """hessian: [in, in], mean of x x^T. mean_magnitude: [in], mean of |x|."""

    def __init__(self, num_columns: int, batches: Iterable[Tensor]) -> None:
        """batches: [tokens, in] fp32 each."""
        accumulator = HessianAccumulator(num_columns)
        magnitude = torch.zeros(num_columns)
        for inputs in batches:
            accumulator.add(inputs)
            magnitude += inputs.abs().sum(dim=0)
        self.hessian = accumulator.mean()
        self.mean_magnitude = magnitude / max(accumulator.num_tokens, 1)

    def are_usable(self) -> bool:
        return is_usable(self.hessian)
