"""What INT8 needs of a stage's inputs: the largest magnitudes, and some tokens to judge errors by."""

from collections.abc import Iterable

import torch
from torch import Tensor

_TOKENS_PER_BATCH = 128
SAMPLE_TOKENS = 1024


class InputRange:
    """amax: [in], largest magnitude of each channel. sample: [tokens, in], evenly spaced in each batch."""

    def __init__(self, num_columns: int, batches: Iterable[Tensor]) -> None:
        """batches: [tokens, in] fp32 each."""
        self.amax = torch.zeros(num_columns)
        samples: list[Tensor] = []
        for inputs in batches:
            self.amax = torch.maximum(self.amax, inputs.abs().amax(dim=0))
            if len(samples) * _TOKENS_PER_BATCH < SAMPLE_TOKENS:
                step = max(1, inputs.shape[0] // _TOKENS_PER_BATCH)
                samples.append(inputs[::step][:_TOKENS_PER_BATCH].clone())
        self.sample = torch.cat(samples) if samples else torch.zeros(0, num_columns)

    def is_usable(self) -> bool:
        """Finite, and not all zero."""
        return bool(torch.isfinite(self.amax).all()) and float(self.amax.max()) > 0
