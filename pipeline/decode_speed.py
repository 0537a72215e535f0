"""Decode speed of two engines, side by side: one stream, a 256-token prompt, 128 new tokens, median of three.

The engines take turns within one process, so a change of the machine's speed meets both.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from bitsmith.compile.engine import Engine
from bitsmith.core.model_input import BLOCK_SIZE, ModelInput

NUM_PROMPT_TOKENS = 256
NUM_NEW_TOKENS = 128
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Median over the rounds. gigabytes_per_s counts the weights read once for each token."""

    tokens_per_s: float
    prefill_tokens_per_s: float
    gigabytes_per_s: float


def measure_decode_speed(engines: dict[str, Engine]) -> dict[str, DecodeSpeed]:
    """Measure all engines in turn, `NUM_ROUNDS` times, after one round that is not counted."""
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
    num_tokens = NUM_PROMPT_TOKENS + NUM_NEW_TOKENS
    engine.allocate_kv_cache(-(-num_tokens // BLOCK_SIZE) + 1)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, engine.vocab_size, (NUM_PROMPT_TOKENS,), generator=generator)
    start = time.perf_counter()
    token = engine.execute(_step(prompt, 0)).argmax(-1)
    prefilled = time.perf_counter()
    for position in range(NUM_PROMPT_TOKENS, num_tokens):
        token = engine.execute(_step(token, position)).argmax(-1)
    return prefilled - start, time.perf_counter() - prefilled


def _step(token_ids: torch.Tensor, first_position: int) -> ModelInput:
    """One request's tokens from `first_position` on, in cache blocks 1, 2, 3, …; logits of the last."""
    num_tokens = token_ids.numel()
    seq_len = first_position + num_tokens
    positions = torch.arange(first_position, seq_len)
    num_blocks = -(-seq_len // BLOCK_SIZE)
    return ModelInput(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions + BLOCK_SIZE,
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        logits_indices=torch.tensor([num_tokens - 1]),
    )
