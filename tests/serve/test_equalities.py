"""Every fast path gives what the slow path gives, token for token.

The model's logits depend on the whole history as it stands in the paged cache, so a wrong slot, block or
length anywhere changes the output.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bitsmith.serve.engine_loop import EngineLoop
from bitsmith.serve.engine_setup import RuntimeLimits, build_engine_loop, resolve_limits
from bitsmith.serve.request import Request
from bitsmith.serve.scheduled_step import RequestProgress
from bitsmith.serve.serve_settings import RuntimeSettings

if TYPE_CHECKING:
    from tests.serve.fake_model import FakeModel

MakeModel = Callable[..., "FakeModel"]
MakeRequest = Callable[..., Request]
Result = tuple[list[int], list[float], list[float], str]


def make_loop(model: "FakeModel", num_blocks: int = 64, **settings: Any) -> tuple[EngineLoop, RuntimeLimits]:
    runtime = RuntimeSettings(kv_cache_bytes=num_blocks * 16 * model.kv_bytes_per_token, **settings)
    limits = resolve_limits(model, runtime)
    return build_engine_loop(model, runtime, limits), limits


def run_all(loop: EngineLoop, requests: Sequence[Request]) -> list[Result]:
    """Tokens, their log-probabilities, the prompt's, and why it ended, in the order of the requests."""
    found: dict[str, Result] = {request.request_id: ([], [], [], "") for request in requests}
    for request in requests:
        loop.add(request)
    for _ in range(5000):
        if not loop.has_unfinished:
            break
        for news in loop.step():
            found[news.request_id] = _joined(found[news.request_id], news)
    assert not loop.has_unfinished, "no end within 5000 steps"
    loop.check_integrity()
    return list(found.values())


def _joined(before: Result, news: RequestProgress) -> Result:
    tokens, logprobs, prompt_logprobs, end = before
    assert not end, "news after the end"
    return (
        tokens + list(news.token_ids),
        logprobs + [entry.logprob for entry in news.logprobs],
        prompt_logprobs + [entry.logprob for entry in news.prompt_logprobs],
        news.finish_reason or "",
    )


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = [1, 2, 15, 16, 17, 31, 33, 48, 70, 100, 5, 64, 90, 3, 130, 7]
    return [torch.randint(0, 290, (lengths[i % 16],), generator=generator).tolist() for i in range(count)]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.05, "logit_bias": ((7, 3.0), (9, -100.0))},
]


def mixed_requests(make_request: MakeRequest, count: int, **more: Any) -> list[Request]:
    return [
        make_request(prompt, seed=100 + index, max_tokens=20 + index, **SAMPLINGS[index % 5], **more)
        for index, prompt in enumerate(prompts(count))
    ]


def alone(make_model: MakeModel, requests: Sequence[Request], **model: Any) -> list[Result]:
    """Each request by itself, whole prompt in one step, nothing cached: the slow path."""
    results = []
    for request in requests:
        loop, _ = make_loop(make_model(max_num_tokens=512, **model), prefix_caching=False)
        results += run_all(loop, [request])
    return results


def test_the_slow_path_is_the_model_itself(make_model: MakeModel, make_request: MakeRequest) -> None:
    model = make_model()
    loop, _ = make_loop(model)
    request = make_request(prompts(9)[8], max_tokens=30)
    ((tokens, _, _, end),) = run_all(loop, [request])
    history = list(request.prompt_token_ids)
    for token in tokens:
        assert token == int(model.logits_of(history).argmax())
        history.append(token)
    assert (len(tokens), end) == (30, "length")


def test_batched_equals_alone(make_model: MakeModel, make_request: MakeRequest) -> None:
    expected = alone(make_model, mixed_requests(make_request, 12, num_logprobs=2))
    loop, _ = make_loop(make_model(), num_blocks=200)
    assert run_all(loop, mixed_requests(make_request, 12, num_logprobs=2)) == expected


@pytest.mark.parametrize("max_num_tokens", [8, 13, 64])
def test_chunked_prefill_equals_whole(
    make_model: MakeModel, make_request: MakeRequest, max_num_tokens: int
) -> None:
    expected = alone(make_model, mixed_requests(make_request, 8))
    model = make_model(max_num_tokens=max_num_tokens)
    loop, _ = make_loop(model, num_blocks=200)
    assert run_all(loop, mixed_requests(make_request, 8)) == expected
    assert max(model.step_sizes) <= max_num_tokens


def test_prefix_hit_equals_cold(make_model: MakeModel, make_request: MakeRequest) -> None:
    shared = prompts(15)[14]
    tails = [[], [1], [2, 3], list(range(40))]

    def requests() -> list[Request]:
        return [make_request(shared + tail, max_tokens=20, num_logprobs=1) for tail in tails]

    expected = alone(make_model, requests())
    loop, _ = make_loop(make_model())
    results, hits = [], []
    for request in requests():
        results += run_all(loop, [request])
        hits.append(request.num_cached_tokens)
    assert results == expected
    assert hits == [0, 128, 128, 128]  # 130 shared tokens: 8 full blocks


@pytest.mark.parametrize("cycle_strength", [0.0, 9.0])
def test_speculated_equals_plain(
    make_model: MakeModel, make_request: MakeRequest, cycle_strength: float
) -> None:
    """Greedy and seeded alike; with a model that repeats itself, many drafts are accepted."""
    requests = mixed_requests(make_request, 5, num_logprobs=1)
    expected = alone(make_model, requests, cycle_strength=cycle_strength)
    fresh = mixed_requests(make_request, 5, num_logprobs=1)
    loop, _ = make_loop(make_model(cycle_strength=cycle_strength), num_blocks=200, speculate="ngram")
    assert run_all(loop, fresh) == expected
    stats = loop.stats.speculation
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
    if cycle_strength:
        assert stats.num_accepted_tokens > 10


def test_speculation_saves_steps_when_the_text_repeats(
    make_model: MakeModel, make_request: MakeRequest
) -> None:
    plain, fast = make_model(cycle_strength=9.0), make_model(cycle_strength=9.0)
    request = {"max_tokens": 200}
    expected = run_all(make_loop(plain)[0], [make_request([5, 6, 7], **request)])
    assert run_all(make_loop(fast, speculate="ngram")[0], [make_request([5, 6, 7], **request)]) == expected
    assert fast.num_steps < plain.num_steps / 2


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_preempted_equals_alone(make_model: MakeModel, make_request: MakeRequest, speculate: str) -> None:
    """A pool for about one and a half requests, eight of them."""
    requests = [
        make_request(prompt[:60], seed=i, max_tokens=60, num_logprobs=1, **SAMPLINGS[i % 5])
        for i, prompt in enumerate(prompts(8))
    ]
    expected = alone(make_model, requests, cycle_strength=4.0)
    again = [
        make_request(prompt[:60], seed=i, max_tokens=60, num_logprobs=1, **SAMPLINGS[i % 5])
        for i, prompt in enumerate(prompts(8))
    ]
    loop, _ = make_loop(make_model(cycle_strength=4.0), num_blocks=12, speculate=speculate)
    assert run_all(loop, again) == expected
    assert loop.stats.num_preemptions > 0
    assert loop.stats.num_free_kv_blocks == 12


@pytest.mark.parametrize(
    ("num_blocks", "max_num_tokens"), [(200, 512), (200, 8), (12, 16)], ids=["whole", "chunked", "preempted"]
)
def test_prompt_logprobs_are_the_models(
    make_model: MakeModel, make_request: MakeRequest, num_blocks: int, max_num_tokens: int
) -> None:
    model = make_model(max_num_tokens=max_num_tokens)
    loop, _ = make_loop(model, num_blocks=num_blocks)
    chosen = [prompt for prompt in prompts(16) if len(prompt) <= 100]
    requests = [
        make_request(prompt, max_tokens=40, num_logprobs=1, wants_prompt_logprobs=True) for prompt in chosen
    ]
    for prompt, (_, _, prompt_logprobs, _) in zip(chosen, run_all(loop, requests), strict=True):
        assert len(prompt_logprobs) == len(prompt) - 1
        for position, logprob in enumerate(prompt_logprobs, start=1):
            row = torch.log_softmax(model.logits_of(prompt[:position]), dim=-1)
            assert logprob == float(row[prompt[position]])


def test_scoring_a_cached_prompt_again_gives_the_same(
    make_model: MakeModel, make_request: MakeRequest
) -> None:
    loop, _ = make_loop(make_model())

    def scored() -> Request:
        return make_request(prompts(10)[9], max_tokens=0, num_logprobs=1, wants_prompt_logprobs=True)

    first = run_all(loop, [scored()])
    assert run_all(loop, [scored()]) == first
    assert first[0][0] == [] and first[0][3] == "length" and len(first[0][2]) == 99


def test_an_abort_anywhere_leaves_the_others_alone(make_model: MakeModel, make_request: MakeRequest) -> None:
    expected = alone(make_model, mixed_requests(make_request, 8))
    loop, _ = make_loop(make_model(max_num_tokens=16), num_blocks=20)
    requests = mixed_requests(make_request, 8)
    doomed = [make_request([index] * 90, max_tokens=50) for index in range(6)]
    for request in doomed:
        loop.add(request)
    for _ in range(7):
        loop.step()
    for request in requests:
        loop.add(request)
    for request in doomed:
        loop.abort(request.request_id)
        loop.step()
    loop.abort("never seen")
    while loop.has_unfinished:
        loop.step()
    assert [request.output_token_ids for request in requests] == [tokens for tokens, *_ in expected]
    assert loop.stats.num_free_kv_blocks == 20
    loop.check_integrity()
