"""Sampling: exact filters, penalties, seeds, and distributions that fit (chi-square, 2000 draws)."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare

from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.rejection_sampler import RejectionSampler
from bitsmith.serve.request import Request, Vocabulary
from bitsmith.serve.sampler import Sampler, adjust_logits, draw, keyed_uniform, target_probs
from bitsmith.serve.token_logprobs import LOGPROB_FLOOR, compute_logprobs

MakeRequest = Callable[..., Request]
ROW = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
SMALL = Vocabulary(6, frozenset())


def kept(**sampling: float) -> list[int]:
    params = SamplingParams(temperature=1.0, **sampling)  # type: ignore[arg-type]
    probs, token_ids = target_probs(ROW, params)
    assert float(probs.sum()) == pytest.approx(1)
    return sorted(token_ids[probs > 0].tolist())


def test_filters_keep_exactly_what_their_definition_says() -> None:
    probs = torch.softmax(ROW, 0).tolist()  # 0.54 0.20 0.12 0.07 0.03 0.01
    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=100) == [0, 1, 2, 3, 4, 5]
    assert kept(top_p=probs[0] - 0.01) == [0]
    assert kept(top_p=probs[0] + 0.01) == [0, 1]
    assert kept(top_p=1e-9) == [0]
    assert kept(min_p=probs[1] / probs[0] - 0.01) == [0, 1]
    assert kept(min_p=1.0) == [0]
    assert kept(top_k=3, min_p=probs[1] / probs[0] + 0.01) == [0]
    # top_p counts within what top_k left: of three, the first holds 0.63
    assert kept(top_k=3, top_p=0.6) == [0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-8, 1e-3])
def test_a_tiny_temperature_is_greedy_and_has_no_nan(temperature: float) -> None:
    probs, _ = target_probs(ROW * 50, SamplingParams(temperature=temperature))
    assert probs.tolist() == [1, 0, 0, 0, 0, 0]


def test_penalties_and_bias_are_added_where_they_belong(make_request: MakeRequest) -> None:
    request = make_request(
        [4], vocabulary=SMALL, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 7.0),)
    )
    for token_id in (0, 0, 1):
        request.append_output(token_id)
    adjusted = adjust_logits(ROW, request, {1: 1, 5: 1})
    expected = ROW + torch.tensor([-1.0, -1.0, 0.0, 7.0, 0.0, -0.75])
    assert torch.equal(adjusted, expected), "the prompt's token 4 is not penalised; drafts 1 and 5 are"


def test_ids_without_text_are_never_chosen(make_request: MakeRequest) -> None:
    row = torch.tensor([0.0, 1.0, 0.5, 90.0, 99.0])
    for temperature in (0.0, 1.0):
        request = make_request([0], vocabulary=Vocabulary(3, frozenset()), temperature=temperature)
        assert Sampler().choose(row, request) in (0, 1, 2)


def test_draw_picks_by_the_running_sum_and_never_an_impossible_id() -> None:
    ids = torch.tensor([7, 8, 9, 10])
    probs = torch.tensor([0.25, 0.5, 0.25, 0.0])
    assert [draw(probs, ids, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999999999999999)] == [
        *(7, 7, 8, 8, 9, 9)
    ]


def test_a_draw_depends_on_seed_and_position_only(make_request: MakeRequest) -> None:
    assert keyed_uniform(1, 5) == keyed_uniform(1, 5)
    values = {keyed_uniform(seed, position) for seed in (-(2**63), -1, 0, 2**63 - 1) for position in range(9)}
    assert len(values) == 36 and all(0 <= value < 1 for value in values)


def _chi_square_p(counts: Counter[int], probs: torch.Tensor) -> float:
    total = counts.total()
    observed = [counts[index] for index in range(len(probs))]
    p_value: float = chisquare(observed, (probs.double() / probs.double().sum() * total).tolist()).pvalue
    return p_value


def test_sampled_tokens_follow_the_target_distribution(make_request: MakeRequest) -> None:
    counts: Counter[int] = Counter()
    for seed in range(2000):
        request = make_request([0], vocabulary=SMALL, temperature=0.8, seed=seed)
        counts[Sampler().choose(ROW, request)] += 1
    assert _chi_square_p(counts, torch.softmax(ROW / 0.8, 0)) > 1e-3


@pytest.mark.parametrize("draft", [0, 3])
def test_tokens_after_drafts_follow_the_target_distribution(make_request: MakeRequest, draft: int) -> None:
    """First token whether the draft is likely or not; second token where the draft was accepted."""
    second_row = ROW.flip(0)
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    num_accepted = 0
    for seed in range(2000):
        request = make_request([0], vocabulary=SMALL, temperature=1.0, seed=seed)
        output = RejectionSampler(Sampler().choose).verify(torch.stack((ROW, second_row)), request, [draft])
        first[output[0]] += 1
        if len(output) == 2:
            num_accepted += 1
            second[output[1]] += 1
    probs = torch.softmax(ROW, 0)
    assert _chi_square_p(first, probs) > 1e-3
    assert _chi_square_p(second, torch.softmax(second_row, 0)) > 1e-3
    assert num_accepted / 2000 == pytest.approx(float(probs[draft]), abs=0.04)
    recovered = Counter({token: count for token, count in first.items() if token != draft})
    residual = probs.clone()
    residual[draft] = 0
    keep = residual > 0
    by_rank = Counter({rank: recovered[int(token)] for rank, token in enumerate(keep.nonzero()[:, 0])})
    assert _chi_square_p(by_rank, residual[keep]) > 1e-3


@pytest.mark.parametrize(
    ("drafts", "target", "expected"),
    [
        ([], [4], [4]),
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 2, 5, 4], [1, 2, 5]),
        ([1, 2, 3], [0, 2, 3, 4], [0]),
    ],
)
def test_greedy_verification(
    make_request: MakeRequest, drafts: list[int], target: list[int], expected: list[int]
) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor(target), 6).float()
    request = make_request([0], vocabulary=SMALL)
    assert RejectionSampler(Sampler().choose).verify(logits, request, drafts) == expected


def test_logprobs_are_raw_and_one_float(make_request: MakeRequest) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 50, generator=generator) * 4
    token_ids = logits[:, :40].argmax(-1).tolist()
    entries = compute_logprobs(logits, token_ids, num_top=3, num_token_ids=40)
    reference = torch.log_softmax(logits.double(), -1)
    for row, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        assert entry.top[0] == (token_id, entry.logprob)
        assert len(entry.top) == 3 and all(known < 40 for known, _ in entry.top)
        assert entry.logprob == pytest.approx(float(reference[row, token_id]), abs=1e-6)


def test_minus_infinity_has_a_floor() -> None:
    logits = torch.tensor([[0.0, -torch.inf]])
    (entry,) = compute_logprobs(logits, [1], num_top=0, num_token_ids=2)
    assert (entry.logprob, entry.top) == (LOGPROB_FLOOR, ((0, 0.0),))


def test_a_flat_nucleus_is_found_by_sorting_everything() -> None:
    logits = torch.linspace(0, 0.5, 3000)
    probs, token_ids = target_probs(logits, SamplingParams(temperature=1.0, top_p=0.9))
    order = torch.softmax(logits, 0).sort(descending=True)
    num_kept = int((order.values.cumsum(0) - order.values < 0.9).sum())
    assert 1024 < len(token_ids) == num_kept
    assert token_ids.tolist() == order.indices[:num_kept].tolist()
    assert float(probs.sum()) == pytest.approx(1)
