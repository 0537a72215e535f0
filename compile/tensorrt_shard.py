"""Cutting linears and embeddings for tensor parallelism, and putting shards together again.

The rules are TensorRT-LLM's: q, k and v are each cut along rows and then joined; KV heads are repeated when
there are fewer than ranks; dense and proj are cut along columns; vocabularies are padded with zero rows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bitsmith.compile.tensorrt_linear import Linear, in_features, join_rows, out_features
from bitsmith.compile.tensorrt_model import EngineModel


def row_index(num_rows: int, tp_size: int, tp_rank: int) -> Tensor:
    """Rows of one rank when rows divide evenly."""
    assert num_rows % tp_size == 0, (num_rows, tp_size)
    size = num_rows // tp_size
    return torch.arange(tp_rank * size, (tp_rank + 1) * size)


def kv_row_index(model: EngineModel, tp_rank: int) -> Tensor:
    """Rows of k or v that a rank holds: its share of the heads, or one head that other ranks have too."""
    if model.num_kv_heads >= model.tp_size:
        return row_index(model.num_kv_heads * model.head_size, model.tp_size, tp_rank)
    head = tp_rank * model.num_kv_heads // model.tp_size
    return torch.arange(head * model.head_size, (head + 1) * model.head_size)


def query_row_index(model: EngineModel, tp_rank: int) -> Tensor:
    return row_index(model.num_heads * model.head_size, model.tp_size, tp_rank)


def shard_qkv(parts: Sequence[Linear], model: EngineModel, tp_rank: int) -> Linear:
    """parts: whole q, k and v with shared scales -> the rank's fused layer, rows Q | K | V."""
    query, key, value = parts
    kv_rows = kv_row_index(model, tp_rank)
    cut = [query.rows(query_row_index(model, tp_rank)), key.rows(kv_rows), value.rows(kv_rows)]
    return join_rows(cut)


def shard_column(linear: Linear, tp_size: int, tp_rank: int) -> Linear:
    """Column parallel: a share of the outputs."""
    if tp_size == 1:
        return linear
    return linear.rows(row_index(out_features(linear), tp_size, tp_rank))


def shard_row(linear: Linear, tp_size: int, tp_rank: int) -> Linear:
    """Row parallel: a share of the inputs."""
    size = in_features(linear) // tp_size
    return linear if tp_size == 1 else linear.columns(tp_rank * size, (tp_rank + 1) * size)


def pad_rows(table: Tensor, num_rows: int) -> Tensor:
    """[vocab, hidden] -> [num_rows, hidden], zeros below."""
    return F.pad(table, (0, 0, 0, num_rows - table.shape[0]))


def shard_head(table: Tensor, model: EngineModel, tp_rank: int) -> Tensor:
    padded = pad_rows(table, model.padded_vocab_size)
    return padded[row_index(model.padded_vocab_size, model.tp_size, tp_rank)]


def shard_embedding(table: Tensor, model: EngineModel, tp_rank: int) -> Tensor:
    if not model.use_parallel_embedding:
        return table
    if model.embedding_sharding_dim == 0:
        return shard_head(table, model, tp_rank)
    return table[:, row_index(model.hidden_size, model.tp_size, tp_rank)]


def join_embedding(shards: Sequence[Tensor], model: EngineModel) -> Tensor:
    """Inverse of `shard_embedding` over all ranks, padding removed."""
    if not model.use_parallel_embedding:
        return shards[0]
    if model.embedding_sharding_dim == 0:
        return torch.cat(list(shards))[: model.vocab_size]
    return torch.cat(list(shards), dim=1)


def split_qkv_rows(weight: Tensor, model: EngineModel) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's fused weight or bias -> its q, k and v rows."""
    query = model.num_rank_heads * model.head_size
    kv = model.num_rank_kv_heads * model.head_size
    return weight[:query], weight[query : query + kv], weight[query + kv :]


def join_kv(shards: Sequence[Tensor], model: EngineModel) -> Tensor:
    """k or v rows of all ranks -> the whole; repeated heads are taken once."""
    repeats = max(1, model.tp_size // model.num_kv_heads)
    return torch.cat(list(shards[::repeats]))
