"""The one form in which work reaches a compiled engine: a flat batch of tokens over a paged KV cache.

Prefill, decode, chunked prefill and speculative verification differ only in these numbers.
"""

from dataclasses import dataclass

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
