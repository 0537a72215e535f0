"""Generation in process: core's TextGenerator over the serving loop."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import PreTrainedTokenizerBase

from bitsmith.core.errors import Refused
from bitsmith.core.protocols import TextGenerator
from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.generator import EngineGenerator
from bitsmith.serve.serve_settings import RuntimeSettings

if TYPE_CHECKING:
    from tests.serve.fake_model import FakeModel


@pytest.fixture
def generator(
    make_model: "Callable[..., FakeModel]", tokenizer: PreTrainedTokenizerBase, tokenizer_dir: Path
) -> EngineGenerator:
    settings = RuntimeSettings(kv_cache_bytes=20 * 256, max_num_seqs=2)
    return EngineGenerator(make_model(), tokenizer, tokenizer_dir, settings)


def test_results_come_in_the_order_of_the_prompts(generator: EngineGenerator) -> None:
    as_protocol: TextGenerator = generator
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    lengths = [30, 2, 5, 1]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    results = list(as_protocol.generate(prompts, params))
    assert [len(result.token_ids) for result in results] == lengths
    assert {result.finish_reason for result in results} == {"length"}
    for prompt, one, result in zip(prompts, params, results, strict=True):
        deltas = list(generator.stream(prompt, one))
        assert "".join(delta.text for delta in deltas) == result.text
        assert sum((delta.token_ids for delta in deltas), ()) == result.token_ids


def test_a_stop_string_cuts_the_text_and_ends_the_request(generator: EngineGenerator) -> None:
    (plain,) = generator.generate([[1, 2]], [SamplingParams(max_tokens=60, ignore_eos=True)])
    stop = plain.text[20:23]
    params = SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,))
    (cut,) = generator.generate([[1, 2]], [params])
    assert cut.text == plain.text[: plain.text.index(stop)] and cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(plain.token_ids)


def test_leaving_early_frees_everything(generator: EngineGenerator) -> None:
    results = generator.generate([[1]] * 5, [SamplingParams(max_tokens=n) for n in (1, 90, 90, 90, 90)])
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert generator._loop.stats.num_free_kv_blocks == 20
    generator._loop.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [([], 5, "0 tokens"), ([1] * 320, 5, "320 tokens.*context of 320"), ([1], 0, "max_tokens is 0")],
)
def test_what_cannot_run_is_refused(
    generator: EngineGenerator, prompt: list[int], max_tokens: int, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        list(generator.generate([prompt], [SamplingParams(max_tokens=max_tokens)]))


def test_an_output_longer_than_the_pool_ends_with_length(generator: EngineGenerator) -> None:
    (result,) = generator.generate([[1] * 300], [SamplingParams(max_tokens=999, ignore_eos=True)])
    assert (len(result.token_ids), result.finish_reason) == (20, "length")
