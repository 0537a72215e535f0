"""The OpenAI routes as the stock `openai` client sees them: a real server, the engine in its own process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerBase

from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.generator import EngineGenerator
from bitsmith.serve.serve_settings import RuntimeSettings

if TYPE_CHECKING:
    from tests.serve.conftest import RunningServer
    from tests.serve.fake_model import FakeModel

MESSAGES: Any = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def client(server: "RunningServer") -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def generator(
    make_model: "Callable[..., FakeModel]", tokenizer: PreTrainedTokenizerBase, tokenizer_dir: Path
) -> EngineGenerator:
    """The same engine in this process, plain decoding."""
    model = make_model(cycle_strength=3.0)
    return EngineGenerator(model, tokenizer, tokenizer_dir, RuntimeSettings(kv_cache_bytes=100 * 256))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_equals_in_process_generation(
    client: openai.OpenAI, generator: EngineGenerator, encode: Callable[[str], list[int]]
) -> None:
    prompt = encode("<|start|>user\nhello there<|end|><|start|>assistant\n")
    for temperature, seed in ((0.0, None), (0.9, 17)):
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=60, temperature=temperature, seed=seed
        )
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=seed)
        (expected,) = generator.generate([prompt], [params])
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_equals_whole(client: openai.OpenAI, n: int) -> None:
    asked: Any = {
        "model": "fake", "messages": MESSAGES, "max_completion_tokens": 50, "temperature": 1.0, "seed": 5,
        "n": n, "logprobs": True, "top_logprobs": 2, "stop": ["q", "&&"],
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, ends, entries = [""] * n, [""] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
    usages = []
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
            if choice.logprobs:
                entries[choice.index] += choice.logprobs.content or []
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert ends[choice.index] == choice.finish_reason
        assert choice.logprobs is not None
        assert entries[choice.index] == choice.logprobs.content
    assert len({choice.message.content for choice in whole.choices}) == n, "choices differ from each other"
    assert [usage for usage in usages if usage] == usages[-1:] and not chunks[-1].choices
    assert whole.usage is not None and usages[-1] is not None
    assert usages[-1].completion_tokens == whole.usage.completion_tokens


def test_the_first_choice_does_not_depend_on_n(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "prompt": "abc", "seed": 9, "max_tokens": 20, "temperature": 1.0}
    one = client.completions.create(**asked, n=1).choices[0].text
    assert client.completions.create(**asked, n=4).choices[0].text == one


def test_prompts_of_every_form(client: openai.OpenAI, encode: Callable[[str], list[int]]) -> None:
    ids = [encode("abc"), encode("the end")]

    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model="fake", prompt=prompt, temperature=0, max_tokens=12)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert texts(["abc", "the end"]) == texts(ids) == texts("abc") + texts(ids[1])
    assert texts([ids[0]]) == texts(ids[0])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_requests(
    client: openai.OpenAI, generator: EngineGenerator, max_tokens: int, make_model: Any
) -> None:
    """As lm-eval's local-completions sends them; an end token inside the prompt counts like any other."""
    prompts = [[5, 6, 257, 8, 9], [1], [3] * 70]
    answer = client.completions.create(
        model="fake", prompt=prompts, temperature=0, max_tokens=max_tokens, logprobs=1, seed=1234, echo=True
    )
    model = make_model(cycle_strength=3.0)
    model.allocate_kv_cache(1)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs
        assert logprobs.tokens and logprobs.text_offset
        expected_length = len(prompt) + max_tokens
        for array in (
            logprobs.token_logprobs, logprobs.top_logprobs, logprobs.tokens, logprobs.text_offset
        ):  # fmt: skip
            assert len(array) == expected_length
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        for position in range(1, len(prompt)):
            row = model.logits_of(prompt[:position]).log_softmax(-1)
            assert logprobs.token_logprobs[position] == float(row[prompt[position]])
            is_greedy = logprobs.token_logprobs[position] == max(logprobs.top_logprobs[position].values())
            assert is_greedy == (int(row[:260].argmax()) == prompt[position])
    assert "<|end|>" in answer.choices[0].text and answer.choices[0].text.startswith("&'<|end|>)*")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * max_tokens


def test_echo_returns_a_text_prompt_as_it_was_written(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "prompt": "caf\u00e9 <|other|>", "temperature": 0, "max_tokens": 8}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == asked["prompt"] + plain
    streamed = "".join(c.choices[0].text for c in client.completions.create(**asked, echo=True, stream=True))
    assert streamed == asked["prompt"] + plain


def test_stop_strings_that_spell_special_tokens_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="abc", logit_bias={"259": 100}, stop="<|other|>", max_tokens=9
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")


def test_the_end_token_stops_unless_it_is_ignored(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "prompt": "abc", "logit_bias": {"257": 100}, "max_tokens": 9}
    answer = client.completions.create(**asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 9


def test_an_output_that_fills_the_context_ends_with_length(client: openai.OpenAI) -> None:
    asked: Any = {"logit_bias": {"65": 100}, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "a" * 450}]
    answer = client.chat.completions.create(model="fake", messages=messages, **asked)
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 512)
    prompt = [65] * 500
    cut = client.completions.create(model="fake", prompt=prompt, max_tokens=100, **asked)
    assert cut.usage is not None and cut.usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError, match="512 tokens") as refused:
        client.completions.create(model="fake", prompt=[65] * 512, max_tokens=1)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"


def test_a_template_error_is_told_in_its_own_words(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "tool", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="tool messages are not known here"):
        client.chat.completions.create(model="fake", messages=messages)


def test_many_concurrent_streams_are_what_each_is_alone(client: openai.OpenAI) -> None:
    def text(index: int) -> str:
        parts = client.completions.create(
            model="fake", prompt=f"{index % 5} prompt " * (index % 7 + 1), seed=index % 5, max_tokens=40,
            temperature=(index % 3) / 2, stream=True,
        )  # fmt: skip
        return "".join(part.choices[0].text for part in parts)

    alone = [text(index) for index in range(16)]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(text, range(16))) == alone


def test_metrics_name_their_units_and_count(server: "RunningServer", client: openai.OpenAI) -> None:
    before = server.metric("output_tokens_total")
    client.completions.create(model="fake", prompt="tell me", max_tokens=30, extra_body={"ignore_eos": True})
    assert server.metric("output_tokens_total") == before + 30
    assert server.metric("ttft_seconds_count") >= 1 and server.metric("itl_seconds_count") >= 1
    assert server.metric("kv_blocks_capacity") == 100
    assert server.metric("kv_cache_bytes") == 100 * 16 * 16  # the fake engine's 16 bytes a token
    drafted, accepted = server.metric("spec_draft_tokens_total"), server.metric("spec_accepted_tokens_total")
    assert 0 < accepted <= drafted
    text = httpx.get(server.url + "/metrics").text
    assert 'bitsmith_ttft_seconds_bucket{le="+Inf"}' in text and "tell me" not in text
