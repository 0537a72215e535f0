"""From one row of logits to one token id. Knows the request's sampling parameters, not how rows were made.

Order of the operations: ids without text are removed; logit_bias; presence and frequency penalties (over the
output so far); temperature; top_k; top_p; min_p; draw. Temperature 0 takes the most likely id after the
penalties. Everything works on one row at a time, so a request's choice does not depend on the batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.request import Request

_UINT64_MASK = (1 << 64) - 1
_NUM_SORTED_FIRST = 1024


def keyed_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: no state to lose in a preemption."""
    key = np.array([seed & _UINT64_MASK, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def is_plain_greedy(params: SamplingParams) -> bool:
    """The arg-max of the raw logits is the answer."""
    return (
        params.temperature == 0
        and not params.logit_bias
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
    )


def adjust_logits(
    row: torch.Tensor, request: Request, extra_counts: Mapping[int, int] | None = None
) -> torch.Tensor:
    """Known ids only, with bias and penalties. row: [vocab] -> [num_token_ids]; the row is left as it was.

    extra_counts: occurrences of drafts that stand between the request's tokens and this row.
    """
    params = request.sampling
    logits = row[: request.vocabulary.num_token_ids].clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[torch.tensor(ids)] += torch.tensor(biases, dtype=torch.float32)
    if params.presence_penalty or params.frequency_penalty:
        counts = dict(request.output_counts)
        for token_id, count in (extra_counts or {}).items():
            counts[token_id] = counts.get(token_id, 0) + count
        if counts:
            occurrences = torch.tensor(list(counts.values()), dtype=torch.float32)
            penalty = params.presence_penalty + params.frequency_penalty * occurrences
            logits[torch.tensor(list(counts))] -= penalty
    return logits


def target_probs(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs, token_ids), both [n]: what is drawn from.

    logits: [num_token_ids], adjusted. With top_k or top_p the most likely comes first; without, ids are in
    their own order.
    """
    assert params.temperature > 0, params.temperature
    # The maximum is taken off before the division, so a tiny temperature gives a sharp row and no NaN.
    probs = torch.softmax((logits - logits.max()) / params.temperature, dim=-1)
    token_ids = torch.arange(len(probs))
    if params.top_k:
        probs, token_ids = torch.topk(probs, min(params.top_k, len(probs)))
        probs = probs / probs.sum()
    if params.top_p < 1:
        probs, token_ids = _nucleus(probs, token_ids, params.top_p)
    if params.min_p > 0:
        keep = probs >= params.min_p * probs.max()
        probs, token_ids = probs[keep], token_ids[keep]
    return probs / probs.sum(), token_ids


def _nucleus(probs: torch.Tensor, token_ids: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely ids before which less than top_p had been gathered; the first one always.

    Nearly always they are few, so the few most likely are looked at before everything is sorted.
    """
    for num_sorted in (_NUM_SORTED_FIRST, len(probs)):
        best, ranks = torch.topk(probs, min(num_sorted, len(probs)))
        before = best.cumsum(0) - best
        num_kept = max(int((before < top_p).sum()), 1)
        if num_kept < len(best):
            break
    return best[:num_kept], token_ids[ranks[:num_kept]]


def draw(probs: torch.Tensor, token_ids: torch.Tensor, uniform: float) -> int:
    """The id at which the running sum of probs passes `uniform`."""
    cumulative = probs.to(torch.float64).cumsum(0)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    index = min(index, len(probs) - 1)
    while probs[index] == 0 and index > 0:  # rounding at the very end must not pick an impossible id
        index -= 1
    return int(token_ids[index])


class Sampler:
    """Chooses the token at a position of a request from that position's logits."""

    def choose(self, row: torch.Tensor, request: Request, drafts_before: Sequence[int] = ()) -> int:
        """row: [vocab] fp32 raw logits of the token after `drafts_before` after the request's tokens."""
        params = request.sampling
        extra_counts: dict[int, int] = {}
        for token_id in drafts_before:
            extra_counts[token_id] = extra_counts.get(token_id, 0) + 1
        logits = adjust_logits(row, request, extra_counts)
        if params.temperature == 0:
            return int(logits.argmax())
        probs, token_ids = target_probs(logits, params)
        position = request.num_tokens + len(drafts_before)
        return draw(probs, token_ids, keyed_uniform(request.seed, position))
