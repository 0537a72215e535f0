"""Drafts by prompt lookup: what followed the last time the text ended like this."""

from collections.abc import Sequence
from typing import Protocol

from bitsmith.serve.request import Request


class Proposer(Protocol):
    """Guesses the next tokens of a request."""

    def propose(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """At most num_tokens ids; fewer, or none, when there is no guess."""
        ...


class NgramProposer:
    """Finds the newest earlier occurrence of the last n tokens, longest n first.

    prompt_lookup_min, prompt_lookup_max: bounds of n.
    """

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 4) -> None:
        assert 0 < prompt_lookup_min <= prompt_lookup_max, (prompt_lookup_min, prompt_lookup_max)
        self._min = prompt_lookup_min
        self._max = prompt_lookup_max

    def propose(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        return find_continuation(request.token_ids, self._min, self._max, num_tokens)


def find_continuation(
    token_ids: Sequence[int], min_ngram: int, max_ngram: int, num_tokens: int
) -> tuple[int, ...]:
    """Up to num_tokens ids that followed the newest earlier occurrence of the longest matching suffix.

    >>> find_continuation([1, 2, 3, 9, 1, 2], 2, 4, 2)
    (3, 9)
    >>> find_continuation([1, 2, 3], 2, 4, 2)
    ()
    """
    last = len(token_ids) - 1
    best_length, best_end = 0, 0
    for end in range(last - 1, min_ngram - 2, -1):  # end: where an earlier occurrence's last token stands
        length = 0
        while length < max_ngram and length <= end and token_ids[end - length] == token_ids[last - length]:
            length += 1
        if length > best_length:
            best_length, best_end = length, end
            if length == max_ngram:
                break
    if best_length < min_ngram:
        return ()
    return tuple(token_ids[best_end + 1 : best_end + 1 + num_tokens])
