"""The paged KV cache: for each layer one tensor of keys and one of values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.compile.decoder_plan import DecoderPlan
from bitsmith.core.model_input import BLOCK_SIZE

BLOCK_LAYOUT = f"blocks-kv-heads-{BLOCK_SIZE}-head-size-v1"


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys, values: for each layer [num_blocks, num_kv_heads, BLOCK_SIZE, head_size]."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Of the memory behind the tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.keys, *self.values))

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / (self.num_blocks * BLOCK_SIZE)


def allocate_kv_cache(plan: DecoderPlan, num_blocks: int) -> KVCache:
    """Zeros, so that the operating system hands out memory only for blocks that are used."""
    config = plan.config
    shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_size)

    def tensors() -> list[Tensor]:
        return [torch.zeros(shape, dtype=plan.kv_cache_dtype) for _ in range(config.num_layers)]

    return KVCache(tensors(), tensors(), num_blocks)
