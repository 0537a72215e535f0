"""Prompt lookup and the two rules that switch it off."""

import doctest
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsmith.serve import ngram_proposer
from bitsmith.serve.ngram_proposer import NgramProposer, find_continuation
from bitsmith.serve.request import Request
from bitsmith.serve.scheduled_step import RequestOutput, ScheduledRequest, ScheduledStep, StepOutput
from bitsmith.serve.speculation import AdaptiveSpeculator, SpeculationLimits


def test_examples_in_the_module_hold() -> None:
    assert doctest.testmod(ngram_proposer).failed == 0


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 1, 2], (3, 1, 2)),
        ([7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], (6, 9, 1)),  # the newest occurrence
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], (5, 8, 1)),  # a longer match goes before a newer one
        ([4, 4, 4, 4], (4,)),
        ([1, 2, 3, 4], ()),
        ([1], ()),
    ],
)
def test_lookup(tokens: list[int], expected: tuple[int, ...]) -> None:
    assert find_continuation(tokens, 2, 4, 3) == expected


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_a_draft_is_what_followed_the_same_ending(
    tokens: list[int], low: int, extra: int, count: int
) -> None:
    draft = find_continuation(tokens, low, low + extra, count)
    assert len(draft) <= count
    if draft:
        ending = tokens[-low:]
        assert any(
            tokens[end - low : end] == ending and tuple(tokens[end : end + len(draft)]) == draft
            for end in range(low, len(tokens))
        )


def _decoding(make_request: Callable[..., Request], count: int) -> list[Request]:
    requests = [make_request([1, 2, 3, 1, 2], max_tokens=500) for _ in range(count)]
    for request in requests:
        request.num_computed_tokens = 4
    return requests


def _verified(request: Request, num_drafts: int, num_accepted: int) -> tuple[ScheduledStep, StepOutput]:
    scheduled = ScheduledRequest(request, 4, 1 + num_drafts, num_drafts, 0, 0, True, ())
    return ScheduledStep((scheduled,)), StepOutput((RequestOutput(tuple(range(num_accepted + 1))),))


def test_drafts_shorten_as_the_batch_grows_and_end_at_last(make_request: Callable[..., Request]) -> None:
    speculator = AdaptiveSpeculator(NgramProposer(), SpeculationLimits(num_speculative_tokens=3))
    lengths = []
    for count in (1, 4, 5, 8, 9, 32):
        requests = _decoding(make_request, count)
        speculator.propose(requests)
        lengths.append(len(requests[-1].draft_token_ids))
        assert count + sum(len(request.draft_token_ids) for request in requests) <= max(16, count)
    assert lengths == [3, 3, 2, 1, 0, 0]
    assert speculator.stats.num_speculative_tokens == 0


def test_a_request_whose_drafts_fail_pauses_longer_each_time(make_request: Callable[..., Request]) -> None:
    limits = SpeculationLimits(num_speculative_tokens=2, window=4, first_pause=3, max_pause=6)
    speculator = AdaptiveSpeculator(NgramProposer(), limits)
    bad, good = _decoding(make_request, 2)
    pauses: list[int] = []
    current = 0
    for _ in range(60):
        for request in (bad, good):
            request.draft_token_ids = ()
        speculator.propose([bad, good])
        assert good.draft_token_ids == (3, 1)
        speculator.observe(*_verified(good, 2, 2))
        if bad.draft_token_ids:
            if current:
                pauses.append(current)
            current = 0
            speculator.observe(*_verified(bad, 2, 0))
        else:
            current += 1
            assert speculator.stats.num_suspended <= 1
    assert pauses[:4] == [3, 6, 6, 6]
    stats = speculator.stats
    assert stats.num_accepted_tokens == 120 and stats.num_draft_tokens == 120 + 2 * (len(pauses) * 2 + 2)


def test_no_draft_goes_beyond_the_output_limit(make_request: Callable[..., Request]) -> None:
    speculator = AdaptiveSpeculator(NgramProposer(), SpeculationLimits())
    (request,) = _decoding(make_request, 1)
    for limit, expected in ((1, 0), (2, 1), (3, 2)):
        request.max_output_tokens = limit
        request.draft_token_ids = ()
        speculator.propose([request])
        assert len(request.draft_token_ids) == expected
