"""Decode speed of two engines, side by side: one stream, a 256-token prompt, 128 new tokens, median of three.

The engines take turns within one process, so a change of the machine's speed meets both.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine, leave_threads_to_operators
from bitsmith.core.errors import Refused

NUM_PROMPT_TOKENS = 256
NUM_NEW_TOKENS = 128
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Median over the rounds. gigabytes_per_s counts the weights read once for each token."""

    tokens_per_s: float
    prefill_tokens_per_s: float
    gigabytes_per_s: float


def check_context(max_model_len: int) -> None:
    """Raises Refused where the measured stream would not fit."""
    needed = NUM_PROMPT_TOKENS + NUM_NEW_TOKENS
    if max_model_len < needed:
        raise Refused(
            f"compile.max_model_len is {max_model_len}; the decode speed is measured on {needed} tokens, "
            f"so at least {needed} are needed."
        )


def measure_decode_speed(engines: dict[str, Engine]) -> dict[str, DecodeSpeed]:
    """Measure all engines in turn, `NUM_ROUNDS` times, after one round that is not counted."""
    leave_threads_to_operators()
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for index in range(NUM_ROUNDS + 1):
        for name, engine in engines.items():
            timing = _time_one_stream(engine)
            if index > 0:
                rounds[name].append(timing)
    return {name: _summarise(engines[name], timings) for name, timings in rounds.items()}


def _summarise(engine: Engine, timings: list[tuple[float, float]]) -> DecodeSpeed:
    prefill_s = statistics.median(prefill for prefill, _ in timings)
    decode_s = statistics.median(decode for _, decode in timings)
    tokens_per_s = NUM_NEW_TOKENS / decode_s
    return DecodeSpeed(
        tokens_per_s=tokens_per_s,
        prefill_tokens_per_s=NUM_PROMPT_TOKENS / prefill_s,
        gigabytes_per_s=tokens_per_s * engine.weight_bytes_per_token / 1e9,
    )


def _time_one_stream(engine: Engine) -> tuple[float, float]:
    """Seconds for the prompt, and for the new tokens after it, decoded greedily."""
    num_blocks = num_blocks_for(NUM_PROMPT_TOKENS + NUM_NEW_TOKENS)
    engine.allocate_kv_cache(num_blocks)
    block_ids = range(num_blocks)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, engine.vocab_size, (NUM_PROMPT_TOKENS,), generator=generator).tolist()
    chunk = engine.max_num_tokens
    start = time.perf_counter()
    for first in range(0, NUM_PROMPT_TOKENS, chunk):
        step = RequestStep(prompt[first : first + chunk], first, block_ids, 1)
        token = int(engine.execute(build_model_input([step])).argmax())
    prefilled = time.perf_counter()
    for position in range(NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS + NUM_NEW_TOKENS):
        step = RequestStep([token], position, block_ids, 1)
        token = int(engine.execute(build_model_input([step])).argmax())
    return prefilled - start, time.perf_counter() - prefilled
