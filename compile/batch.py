"""Builds a ModelInput from what each request adds in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bitsmith.core.model_input import BLOCK_SIZE, ModelInput


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step: its tokens `start : start + len(token_ids)` are computed.

    block_ids: its cache blocks in order, enough for all tokens so far. num_logits: logits are wanted for
    the last so many of this step's tokens.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def build_model_input(steps: Sequence[RequestStep]) -> ModelInput:
    """The flat batch of these requests, in their order; logits come request after request."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    seq_lens: list[int] = []
    wanted: list[int] = []
    for step in steps:
        end = step.start + len(step.token_ids)
        assert num_blocks_for(end) <= len(step.block_ids), (end, len(step.block_ids))
        token_ids.extend(step.token_ids)
        positions.extend(range(step.start, end))
        slots.extend(
            step.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(step.start, end)
        )
        starts.append(len(token_ids))
        seq_lens.append(end)
        wanted.extend(range(len(token_ids) - step.num_logits, len(token_ids)))
    max_blocks = max((num_blocks_for(length) for length in seq_lens), default=0)
    block_table = torch.zeros((len(steps), max_blocks), dtype=torch.int32)
    for row, (step, length) in enumerate(zip(steps, seq_lens, strict=True)):
        used = num_blocks_for(length)
        block_table[row, :used] = torch.tensor(step.block_ids[:used], dtype=torch.int32)
    return ModelInput(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_table=block_table,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        logits_indices=torch.tensor(wanted, dtype=torch.int64),
    )
