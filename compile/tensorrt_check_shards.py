"""Whether the ranks of a checkpoint belong together: replicas that are equal, parts that are not copies."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bitsmith.compile.tensor_file import TensorFile
from bitsmith.compile.tensorrt_checkpoint import EngineCheckpoint
from bitsmith.compile.tensorrt_finding import Finding, refuse
from bitsmith.compile.tensorrt_layout import module_name
from bitsmith.compile.tensorrt_shard import split_qkv_rows

_COLUMN = (".attention.qkv.", ".mlp.fc.", ".mlp.gate.")
_ROW = (".attention.dense.", ".mlp.proj.")


def check_shards(checkpoint: EngineCheckpoint) -> Iterator[Finding]:
    """Assumes that names and shapes were found right."""
    for pp_rank in range(checkpoint.model.pp_size):
        stage = checkpoint.stage(pp_rank)
        yield from _check_padding(checkpoint, stage)
        if len(stage) == 1:
            continue
        for name, (_, shape) in stage[0].header.items():
            tensors = [file.tensor(name) for file in stage if name in file.header]
            yield from _check_ranks(checkpoint, name, shape, tensors)
        if checkpoint.model.tp_size > checkpoint.model.num_kv_heads:
            yield from _check_repeated_heads(checkpoint, stage)


def _check_ranks(
    checkpoint: EngineCheckpoint, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]
) -> Iterator[Finding]:
    are_equal = all(_same(tensor, tensors[0]) for tensor in tensors)
    where = f"rank*.safetensors: {name}"
    if is_replicated(checkpoint, name, shape):
        if not are_equal:
            text = "must be the same on every tensor-parallel rank and is not; write one value to all."
            yield refuse("replica-differs", where, text)
    elif are_equal and name.endswith(".weight") and bool(tensors[0].view(torch.uint8).any()):
        text = (
            "is identical on all ranks, which hold parts of one matrix; the ranks are copies. Export again."
        )
        yield refuse("shards-identical", where, text)


def is_replicated(checkpoint: EngineCheckpoint, name: str, shape: tuple[int, ...]) -> bool:
    """Whether every tensor-parallel rank holds the whole of this tensor."""
    suffix = name.rpartition(".")[2]
    if "norm" in name or name == "transformer.ln_f.weight" or shape in ((1,), (1, 1)):
        return True
    if name == "transformer.vocab_embedding.weight":
        return not checkpoint.model.use_parallel_embedding
    if any(part in name for part in _COLUMN):
        return suffix == "prequant_scaling_factor"
    if any(part in name for part in _ROW):
        is_per_channel = suffix in ("per_channel_scale", "bias")
        return is_per_channel or (suffix == "weights_scaling_factor" and len(shape) == 1)
    return False


def _check_padding(checkpoint: EngineCheckpoint, stage: Sequence[TensorFile]) -> Iterator[Finding]:
    model = checkpoint.model
    if "lm_head.weight" not in stage[0].header or model.padded_vocab_size == model.vocab_size:
        return
    head = torch.cat([file.tensor("lm_head.weight") for file in stage])
    if bool(head[model.vocab_size :].any()):
        text = (
            f"rows from {model.vocab_size} on are padding and must be zero, or their tokens can be sampled."
        )
        yield refuse("head-padding", "rank*.safetensors: lm_head.weight", text)


def _check_repeated_heads(checkpoint: EngineCheckpoint, stage: Sequence[TensorFile]) -> Iterator[Finding]:
    model = checkpoint.model
    repeats = model.tp_size // model.num_kv_heads
    for index in range(model.layers_per_rank):
        name = module_name(index, "attention.qkv.weight")
        weights = [file.tensor(name) for file in stage]
        if weights[0].dim() != 2 or weights[0].shape[0] != _qkv_rows(checkpoint):
            continue  # packed: two rows share a byte, and the rows' numbers differ
        for start in range(0, model.tp_size, repeats):
            group = [split_qkv_rows(weight, model)[1:] for weight in weights[start : start + repeats]]
            if not all(_same(k, group[0][0]) and _same(v, group[0][1]) for k, v in group):
                text = (
                    "ranks that share a KV head hold different k or v rows; repeat the head on each of them."
                )
                yield refuse("kv-heads-differ", f"rank*.safetensors: {name}", text)


def _qkv_rows(checkpoint: EngineCheckpoint) -> int:
    model = checkpoint.model
    return (model.num_rank_heads + 2 * model.num_rank_kv_heads) * model.head_size


def _same(left: Tensor, right: Tensor) -> bool:
    """Equal bytes, NaN included."""
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )
