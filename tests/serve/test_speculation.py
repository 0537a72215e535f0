"""Prompt lookup and the two rules that switch it off."""

import doctest
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsmith.serve import ngram_proposer
from bitsmith.serve.ngram_proposer import NgramProposer, find_continuation
from bitsmith.serve.request import Request
from bitsmith.serve.scheduled_step import RequestOutput, ScheduledRequest, ScheduledStep, StepOutput
from bitsmith.serve.speculation import AdaptiveSpeculator, SpeculationLimits
from bitsmith.serve.step_cost import StepCost

MakeRequest = Callable[..., Request]


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


def _decoding(make_request: MakeRequest, count: int) -> list[Request]:
    requests = [make_request([1, 2, 3, 1, 2], max_tokens=500) for _ in range(count)]
    for request in requests:
        request.num_computed_tokens = 4
    return requests


def _verified(
    request: Request, num_drafts: int, num_accepted: int
) -> tuple[ScheduledStep, StepOutput, float]:
    scheduled = ScheduledRequest(request, 4, 1 + num_drafts, num_drafts, 0, 0, True, ())
    return ScheduledStep((scheduled,)), StepOutput((RequestOutput(tuple(range(num_accepted + 1))),)), 0.01


def _speculator(**limits: Any) -> AdaptiveSpeculator:
    return AdaptiveSpeculator(NgramProposer(), SpeculationLimits(**limits), StepCost())


def test_drafts_shorten_as_the_batch_grows_and_end_at_last(make_request: MakeRequest) -> None:
    """With a row at 0.2 of an empty step, R requests break even at 0.2 R / (1 + 0.2 R)."""
    speculator = _speculator()
    lengths = []
    for count in (1, 2, 4, 7, 8, 32):
        requests = _decoding(make_request, count)
        speculator.propose(requests)
        lengths.append(len(requests[-1].draft_token_ids))
    assert lengths == [3, 2, 1, 1, 0, 0]
    assert speculator.stats.num_speculative_tokens == 0
    assert speculator.num_paying(0.99, 32) == 5, "what is nearly always right pays even in a big batch"
    assert speculator.num_paying(1.0, 32) == 5 and speculator.num_paying(0.0, 1) == 0
    assert speculator.num_paying(0.9, 0) == 0


def test_a_request_whose_drafts_fail_pauses_longer_each_time(make_request: MakeRequest) -> None:
    speculator = _speculator(first_pause=3, max_pause=6, prior_weight=1.0)
    bad, good = _decoding(make_request, 2)
    pauses: list[int] = []
    current = 0
    for _ in range(60):
        for request in (bad, good):
            request.draft_token_ids = ()
        speculator.propose([bad, good])
        assert good.draft_token_ids
        num_good = len(good.draft_token_ids)
        speculator.observe(*_verified(good, num_good, num_good))
        if bad.draft_token_ids:
            if current:
                pauses.append(current)
            current = 0
            speculator.observe(*_verified(bad, len(bad.draft_token_ids), 0))
        else:
            current += 1
            assert speculator.stats.num_suspended <= 1
    assert pauses[:4] == [3, 6, 6, 6]
    assert len(good.draft_token_ids) == 3, "all that the text offered"
    stats = speculator.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("fixed", [1e-4, 0.04, 1.0])
@pytest.mark.parametrize("row_cost", [0.02, 0.2, 1.0])
def test_the_cost_of_a_row_is_found_from_the_times(fixed: float, row_cost: float) -> None:
    """Also when a step now and then is disturbed by a neighbour."""
    cost = StepCost()
    generator = random.Random(3)
    for index in range(400):
        size = generator.randint(1, 16)
        disturbed = 50 if index % 40 == 17 else 1
        cost.observe(size, fixed * (1 + row_cost * size) * disturbed)
    assert cost.row_cost == pytest.approx(row_cost, rel=0.5, abs=0.02)


def test_without_times_or_a_spread_of_sizes_the_cost_is_the_first_guess() -> None:
    cost = StepCost()
    assert cost.row_cost == pytest.approx(0.2)
    for _ in range(5):
        cost.observe(4, 0.01)
    assert cost.row_cost == pytest.approx(0.2)


def test_no_draft_goes_beyond_the_output_limit(make_request: MakeRequest) -> None:
    speculator = _speculator()
    (request,) = _decoding(make_request, 1)
    for limit, expected in ((1, 0), (2, 1), (3, 2)):
        request.max_output_tokens = limit
        request.draft_token_ids = ()
        speculator.propose([request])
        assert len(request.draft_token_ids) == expected
