"""Sliding windows and prefix reuse together: what the serving loop decodes equals one full pass.

A window hides positions that a reused prefix holds, and a request that found its prefix computes none of it:
an off-by-one of the window, or a block of the prefix that the window still needs, shows here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine
from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.engine_loop import EngineLoop
from bitsmith.serve.engine_setup import build_engine_loop, resolve_limits
from bitsmith.serve.request import Request, Vocabulary
from bitsmith.serve.serve_settings import RuntimeSettings

WINDOW = 24
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)
ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]


def _engine(model_type: str, make_model: ModelMaker, eager_engine: EngineMaker, window: int) -> Engine:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma3_text" else {}
    return eager_engine(make_model(model_type, sliding_window=window, **layers))


def _loop(engine: Engine, max_num_batched_tokens: int) -> EngineLoop:
    settings = RuntimeSettings(
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_bytes=32 * 16 * engine.kv_bytes_per_token,
    )
    return build_engine_loop(engine, settings, resolve_limits(engine, settings))


def _decode(loop: EngineLoop, prompt: Sequence[int], num_tokens: int) -> tuple[Request, list[float]]:
    """Greedily, one token a step; the request with its output, and the log-probability of each token."""
    request = Request(
        request_id=f"{len(prompt)}-{loop.stats.num_steps}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, num_logprobs=1, ignore_eos=True),
        vocabulary=Vocabulary(301, frozenset()),
        max_output_tokens=num_tokens,
        seed=0,
    )
    loop.add(request)
    logprobs: list[float] = []
    while loop.has_unfinished:
        for news in loop.step():
            logprobs += [entry.logprob for entry in news.logprobs]
    loop.check_integrity()
    return request, logprobs


def _full_pass(engine: Engine, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after every position, from one step over a fresh cache: [length, vocab_size]."""
    blocks = range(num_blocks_for(len(token_ids)))
    step = RequestStep(token_ids, 0, blocks, len(token_ids))
    return engine.execute(build_model_input([step]), engine.new_kv_cache(len(blocks))).log_softmax(-1)


def _check(engine: Engine, request: Request, logprobs: Sequence[float]) -> None:
    output = request.output_token_ids
    rows = _full_pass(engine, [*request.prompt_token_ids, *output])[len(request.prompt_token_ids) - 1 : -1]
    assert rows.argmax(-1).tolist() == list(output)
    assert [float(row[token]) for row, token in zip(rows, output, strict=True)] == list(logprobs)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_decoding_with_a_reused_prefix_equals_a_full_pass(
    model_type: str,
    length: int,
    max_num_batched_tokens: int,
    make_model: ModelMaker,
    eager_engine: EngineMaker,
) -> None:
    engine = _engine(model_type, make_model, eager_engine, WINDOW)
    loop = _loop(engine, max_num_batched_tokens)
    prompt = torch.randint(0, 250, (length - 5,), generator=torch.Generator().manual_seed(length)).tolist()
    cold, cold_logprobs = _decode(loop, prompt, 5)
    _check(engine, cold, cold_logprobs)
    assert len(cold.output_token_ids) == 5 and cold.num_cached_tokens == 0
    again, again_logprobs = _decode(loop, prompt, 5)
    assert again.num_cached_tokens == (len(prompt) - 1) // 16 * 16 > 0
    assert (again.output_token_ids, again_logprobs) == (cold.output_token_ids, cold_logprobs)
    # Another end after a shared beginning, decoded until the prefix has left the window.
    other, other_logprobs = _decode(loop, [*prompt[:16], 7, 8], WINDOW + 3)
    assert other.num_cached_tokens == 16
    _check(engine, other, other_logprobs)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_the_window_is_felt_from_its_own_length_on(
    model_type: str, make_model: ModelMaker, eager_engine: EngineMaker
) -> None:
    """A row at position p sees min(p + 1, window) tokens: the first that a window changes is row `window`."""
    token_ids = torch.randint(0, 250, (2 * WINDOW,), generator=torch.Generator().manual_seed(1)).tolist()
    narrow, wide = (
        _full_pass(_engine(model_type, make_model, eager_engine, window), token_ids)
        for window in (WINDOW, 200)
    )
    assert torch.equal(narrow[:WINDOW], wide[:WINDOW])
    assert all(not torch.allclose(narrow[row], wide[row], atol=1e-6) for row in range(WINDOW, 2 * WINDOW))
