"""Which drafts are kept: rejection sampling for drafts that were proposed with certainty.

Terms. accepted: a draft that becomes output. recovered: the token that replaces the first rejected draft,
from the residual distribution max(p_target - p_draft, 0), normalised. bonus: the token after the last draft
when all were accepted. Output of a step: the accepted drafts, then one recovered or bonus token.

A prompt-lookup draft d has p_draft(d) = 1, so the rule "accept with min(1, p_target(d) / p_draft(d))" is
"accept with p_target(d)", and the residual is p_target without d, normalised. Drawing x from p_target and
accepting when x = d does exactly that: x = d happens with p_target(d), and given x != d, x is distributed as
the residual, so x is the recovered token. x is drawn with the number that (seed, position) gives, as without
drafts: so not only the distribution is the target's, but a seeded text is the same token for token whether
speculation was on or off, and greedy text too.
"""

from collections.abc import Callable, Sequence

import torch

from bitsmith.serve.request import Request

ChooseToken = Callable[[torch.Tensor, Request, Sequence[int]], int]


class RejectionSampler:
    """Walks the drafts of one request; knows nothing of how a token is chosen from a row."""

    def __init__(self, choose: ChooseToken) -> None:
        self._choose = choose

    def verify(self, logits: torch.Tensor, request: Request, draft_token_ids: Sequence[int]) -> list[int]:
        """Output tokens, 1 to num_drafts + 1 of them.

        logits: [num_drafts + 1, vocab]; row i follows the request's tokens and draft_token_ids[:i].
        """
        assert len(logits) == len(draft_token_ids) + 1, (len(logits), len(draft_token_ids))
        output: list[int] = []
        for index, draft in enumerate(draft_token_ids):
            chosen = self._choose(logits[index], request, draft_token_ids[:index])
            output.append(chosen)
            if chosen != draft:
                return output
        output.append(self._choose(logits[-1], request, draft_token_ids))
        return output
