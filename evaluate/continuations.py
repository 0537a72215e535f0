"""Log-likelihood of continuations after contexts, in token ids, on any LogitsModel.

Knows nothing of text, tokenizers or tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bitsmith.core.errors import WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel, ScoringRequest
from bitsmith.evaluate.divergence import target_logprobs


@dataclass(frozen=True, slots=True)
class Continuation:
    """`continuation` is scored after `context`, which holds at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """logprob: ln P(continuation | context), nats. is_greedy: every token of it was the arg-max.

    num_truncated: tokens of the context that did not fit in the model and were left out, from the left.
    """

    logprob: float
    is_greedy: bool
    num_truncated: int


@dataclass(frozen=True, slots=True)
class _Input:
    """What the model is fed: the last token of a continuation is predicted, never fed."""

    token_ids: tuple[int, ...]
    num_truncated: int


def score_continuations(
    model: LogitsModel,
    continuations: Sequence[Continuation],
    context_len: int,
    reporter: Reporter,
    label: str,
) -> list[ContinuationScore]:
    """Scores in the order given. context_len: most tokens that may be fed; longer inputs lose their start.

    Equal inputs are fed once: choices of one token after the same context share a single forward pass.
    Raises WorkFailed for a continuation longer than the model's context.
    """
    inputs = [_model_input(item, context_len) for item in continuations]
    wanted: dict[tuple[int, ...], list[int]] = {}
    for index, (item, fed) in enumerate(zip(continuations, inputs, strict=True)):
        if item.continuation:
            wanted.setdefault(fed.token_ids, []).append(index)
    # Longest first: memory runs out at the start or not at all, and neighbours pack well.
    order = sorted(wanted, key=lambda ids: (-len(ids), ids))
    requests = [
        ScoringRequest(ids, max(len(continuations[index].continuation) for index in wanted[ids]))
        for ids in order
    ]
    scores = [ContinuationScore(0.0, True, fed.num_truncated) for fed in inputs]
    results = zip(order, model.score(requests), strict=True)
    for ids, logits in reporter.track(results, total=len(order), label=label):
        for index in wanted[ids]:
            scores[index] = _score(logits, continuations[index].continuation, inputs[index].num_truncated)
    return scores


def _model_input(item: Continuation, context_len: int) -> _Input:
    assert item.context, "a continuation needs at least one token of context"
    if len(item.continuation) > context_len:
        raise WorkFailed(
            f"A continuation of {len(item.continuation)} tokens does not fit in the context of "
            f"{context_len}. Compile with a larger --max-model-len or leave the task out."
        )
    whole = (item.context + item.continuation)[:-1]
    kept = whole[-context_len:]
    return _Input(kept, len(whole) - len(kept))


def _score(
    logits: torch.Tensor,  # [num_scored, vocab_size], the last rows belong to this continuation
    continuation: tuple[int, ...],
    num_truncated: int,
) -> ContinuationScore:
    targets = torch.tensor(continuation, dtype=torch.int64)  # [num_continuation]
    rows = logits[-len(continuation) :]
    logprob = float(target_logprobs(rows, targets).sum())
    # arg-max takes NaN for the largest: broken logits must not count as the greedy choice.
    is_greedy = not math.isnan(logprob) and bool((rows.argmax(dim=-1) == targets).all())
    return ContinuationScore(logprob, is_greedy, num_truncated)
