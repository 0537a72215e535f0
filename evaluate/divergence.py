"""How far a candidate's next-token distributions lie from a baseline's, position by position.

Pure functions on logits. Knows nothing of texts, windows of a text, or where the logits came from.
Terms, for one position with true next token y: `logprob` is ln p(y) in nats; `kl` is
KL(P_baseline || P_candidate) over the whole vocabulary in nats; `same_top1` says that both put their
largest logit on the same token (1 or 0); `delta_p` is p_candidate(y) - p_baseline(y). Where a logit is
NaN, all of them are NaN: an arg-max would take the NaN for the largest, and agree by accident.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# Rows of logits go in slices whose float64 copies stay in the cache: a third of the time of 64 MB slices.
_SLICE_BYTES = 4 << 20
_FLOAT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One entry per scored position; all arrays [num_tokens]."""

    baseline_logprob: NDArray[np.float64]
    candidate_logprob: NDArray[np.float64]
    kl: NDArray[np.float64]
    same_top1: NDArray[np.float64]

    @property
    def delta_p(self) -> NDArray[np.float64]:
        delta: NDArray[np.float64] = np.exp(self.candidate_logprob) - np.exp(self.baseline_logprob)
        return delta


def compare_logits(
    baseline_logits: torch.Tensor,  # [num_tokens, vocab_size]
    candidate_logits: torch.Tensor,  # [num_tokens, vocab_size]
    targets: torch.Tensor,  # [num_tokens] int64, the true next tokens
) -> TokenScores:
    """Scores of every position. No top-k, no 16-bit storage: float64 from the logits to the sum."""
    num_tokens, vocab_size = baseline_logits.shape
    assert candidate_logits.shape == baseline_logits.shape, (baseline_logits.shape, candidate_logits.shape)
    assert targets.shape == (num_tokens,), (targets.shape, num_tokens)
    rows = max(1, _SLICE_BYTES // (_FLOAT64_BYTES * vocab_size))
    parts = [
        _compare_rows(baseline_logits[i : i + rows], candidate_logits[i : i + rows], targets[i : i + rows])
        for i in range(0, num_tokens, rows)
    ]
    return concatenate_scores(parts)


def _compare_rows(baseline: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    baseline_log = torch.log_softmax(baseline.double(), dim=-1)  # [rows, vocab_size]
    candidate_log = torch.log_softmax(candidate.double(), dim=-1)
    column = targets.unsqueeze(-1)
    baseline_logprob = baseline_log.gather(-1, column).squeeze(-1)
    candidate_logprob = candidate_log.gather(-1, column).squeeze(-1)
    difference = baseline_log - candidate_log
    # Where the baseline gives a token no mass at all, its term is 0 by the limit p ln p -> 0, not NaN.
    difference = difference.masked_fill(baseline_log == -torch.inf, 0.0)
    kl = (baseline_log.exp() * difference).sum(dim=-1)
    same_top1 = (baseline.argmax(dim=-1) == candidate.argmax(dim=-1)).double()
    return TokenScores(
        baseline_logprob.numpy(),
        candidate_logprob.numpy(),
        # Rounding can leave a sum of -1e-17 where the truth is 0; NaN stays NaN.
        kl.clamp_min(0.0).numpy(),
        same_top1.masked_fill(kl.isnan(), torch.nan).numpy(),
    )


def concatenate_scores(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        np.concatenate([part.baseline_logprob for part in parts]),
        np.concatenate([part.candidate_logprob for part in parts]),
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.same_top1 for part in parts]),
    )


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """ln p of each target: [num_tokens, vocab_size] and [num_tokens] -> [num_tokens] float32."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
