"""The ways in which parity computes the same windows of tokens: prefill, decode, and both in one batch.

A phase is a list of steps, a step a list of pieces; every piece's logits are those of the same positions of
the window, whatever the phase, and are compared with the same reference.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine
from bitsmith.compile.limits import EngineLimits

_NUM_DECODED = 16
_NUM_MIXED = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions `start : end` of a window, computed in one step; logits for all of them or for none."""

    window: int
    start: int
    end: int
    wants_logits: bool


Step = list[Piece]


def prefill_steps(num_windows: int, seq_len: int, limits: EngineLimits) -> list[Step]:
    """Each window alone, in as few chunks as the engine takes."""
    return [
        [piece]
        for window in range(num_windows)
        for piece in _chunks(window, 0, seq_len, limits, wants_logits=True)
    ]


def decode_steps(
    num_windows: int, seq_len: int, limits: EngineLimits, num_decoded: int = _NUM_DECODED
) -> list[Step]:
    """The first part of each window as a prompt, then the rest token by token, windows side by side."""
    num_decoded = min(num_decoded, seq_len - 1)
    steps: list[Step] = []
    for first in range(0, num_windows, limits.max_batch_size):
        group = range(first, min(first + limits.max_batch_size, num_windows))
        for window in group:
            prompt = _chunks(window, 0, seq_len - num_decoded, limits, wants_logits=False)
            steps += [[piece] for piece in prompt]
        for position in range(seq_len - num_decoded, seq_len):
            steps.append([Piece(window, position, position + 1, True) for window in group])
    return steps


def mixed_steps(num_windows: int, seq_len: int, limits: EngineLimits) -> list[Step]:
    """One batch of a decoded token, a later chunk of a prompt, and a new prompt.

    No steps where the engine cannot take two requests at once.
    """
    num_together = min(_NUM_MIXED, num_windows, limits.max_batch_size)
    chunk = min(seq_len // 2, (limits.max_num_tokens - 1) // 2)
    if num_together < 2 or chunk < 1:
        return []
    middle = seq_len - chunk
    steps: list[Step] = [[piece] for piece in _chunks(0, 0, seq_len - 1, limits, wants_logits=False)]
    steps += [[piece] for piece in _chunks(1, 0, middle, limits, wants_logits=False)]
    mixed = [Piece(0, seq_len - 1, seq_len, True), Piece(1, middle, seq_len, True)]
    if num_together > 2:
        mixed.append(Piece(2, 0, chunk, True))
    return [*steps, mixed]


def _chunks(window: int, start: int, end: int, limits: EngineLimits, *, wants_logits: bool) -> list[Piece]:
    size = limits.max_num_tokens
    return [Piece(window, at, min(at + size, end), wants_logits) for at in range(start, end, size)]


def run_steps(
    engine: Engine, windows: Sequence[Sequence[int]], steps: Sequence[Step]
) -> Iterator[tuple[Piece, Tensor]]:
    """Pieces that want logits, each with its logits [end - start, vocab_size]."""
    blocks = _scattered_blocks(len(windows), num_blocks_for(max(map(len, windows))))
    kv_cache = engine.new_kv_cache(sum(map(len, blocks)))
    for step in steps:
        requests = [
            RequestStep(
                windows[piece.window][piece.start : piece.end],
                piece.start,
                blocks[piece.window],
                piece.end - piece.start if piece.wants_logits else 0,
            )
            for piece in step
        ]
        logits = engine.execute(build_model_input(requests), kv_cache)
        wanted = [piece for piece in step if piece.wants_logits]
        rows = torch.split(logits, [piece.end - piece.start for piece in wanted])
        yield from zip(wanted, rows, strict=True)


def _scattered_blocks(num_windows: int, num_blocks: int) -> list[list[int]]:
    """Cache blocks of each window, in an order without any pattern, so that a wrong block shows."""
    block_ids = list(range(num_windows * num_blocks))
    random.Random(0).shuffle(block_ids)
    return [block_ids[window * num_blocks : (window + 1) * num_blocks] for window in range(num_windows)]
