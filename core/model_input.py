"""The one form in which work reaches a compiled engine: a flat batch of tokens over a paged KV cache.

Prefill, decode, chunked prefill and speculative verification differ only in these numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

BLOCK_SIZE = 16  # tokens of KV cache per block; part of the engine's cache layout


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step. Axes: T = num_tokens (all requests together), R = num_requests, L = num_logits.

    token_ids: [T] int64. positions: [T] int64, position of each token in its own request.
    slot_mapping: [T] int64, block_id * BLOCK_SIZE + offset of the cache cell that the token's K and V fill.
    block_table: [R, max_blocks] int32, cache blocks of each request in order; unused entries are 0.
    query_start_loc: [R + 1] int32, request r owns tokens query_start_loc[r] : query_start_loc[r + 1].
    seq_lens: [R] int32, tokens in the cache after this step (computed before, plus this step's).
    logits_indices: [L] int64, rows of T for which logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor


class ModelInputBuilder:
    """Collects the requests of one step, in order, as plain lists; `build` makes the tensors at once."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._starts = [0]
        self._blocks: list[Sequence[int]] = []
        self._seq_lens: list[int] = []
        self._logits_indices: list[int] = []

    def add(
        self, token_ids: Sequence[int], start: int, block_ids: Sequence[int], logit_offsets: Iterable[int]
    ) -> None:
        """Tokens `start : start + len(token_ids)` of a request.

        block_ids: enough of its cache blocks, in order. logit_offsets: which of these tokens want logits.
        """
        end = start + len(token_ids)
        first = len(self._token_ids)
        self._token_ids += token_ids
        self._positions += range(start, end)
        self._slots += (
            block_ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end)
        )
        self._starts.append(len(self._token_ids))
        self._blocks.append(block_ids[: -(-end // BLOCK_SIZE)])
        self._seq_lens.append(end)
        self._logits_indices += (first + offset for offset in logit_offsets)

    def build(self) -> ModelInput:
        table = np.zeros((len(self._blocks), max(map(len, self._blocks), default=0)), np.int32)
        for row, block_ids in zip(table, self._blocks, strict=True):
            row[: len(block_ids)] = block_ids
        return ModelInput(
            token_ids=_int64(self._token_ids),
            positions=_int64(self._positions),
            slot_mapping=_int64(self._slots),
            block_table=torch.from_numpy(table),
            query_start_loc=_int32(self._starts),
            seq_lens=_int32(self._seq_lens),
            logits_indices=_int64(self._logits_indices),
        )


# By numpy, which is several times faster than torch at turning short lists into arrays.
def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32))


def _int64(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))
