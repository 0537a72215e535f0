"""How far two sets of logits are apart, accumulated row by row."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """max_relative: max |difference| / max |reference logit|. rms: of the differences. kl_mean: nats per
    token, KL(reference || candidate). top1_agreement: fraction of rows with the same greedy token.
    """

    num_rows: int
    max_relative: float
    rms: float
    kl_mean: float
    top1_agreement: float


def _larger(first: float, second: float) -> float:
    """The larger of two; NaN if either is, where `max` would hide it."""
    return second if math.isnan(second) or second > first else first


class LogitComparison:
    """Accumulates rows; `result` may be asked for at any time after the first."""

    def __init__(self) -> None:
        self._num_rows = self._num_agreeing = self._num_values = 0
        self._max_difference = self._max_reference = 0.0
        self._sum_squares = self._sum_kl = 0.0

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        """reference, candidate: [rows, vocab_size] fp32."""
        assert reference.shape == candidate.shape, (reference.shape, candidate.shape)
        difference = candidate - reference
        self._max_difference = _larger(self._max_difference, float(difference.abs().max()))
        self._max_reference = _larger(self._max_reference, float(reference.abs().max()))
        self._sum_squares += float(difference.square().sum(dtype=torch.float64))
        log_p, log_q = reference.log_softmax(-1), candidate.log_softmax(-1)
        self._sum_kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
        self._num_agreeing += int((reference.argmax(-1) == candidate.argmax(-1)).sum())
        self._num_rows += len(reference)
        self._num_values += reference.numel()

    def result(self) -> LogitDifference:
        assert self._num_rows > 0
        return LogitDifference(
            num_rows=self._num_rows,
            max_relative=self._max_difference / self._max_reference if self._max_reference else 0.0,
            rms=(self._sum_squares / self._num_values) ** 0.5,
            kl_mean=_larger(0.0, self._sum_kl / self._num_rows),
            top1_agreement=self._num_agreeing / self._num_rows,
        )
