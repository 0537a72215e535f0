"""What each operator computes, in plain torch: the truth that tests compare with, on any device.

Weights come unpacked; `dequantized` unpacks what `packing` packed. Sums are in fp64, so that a difference
is the operator's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.core.model_input import BLOCK_SIZE
from bitsmith.ops.fp8 import PackedFp8, unpack_fp8
from bitsmith.ops.packing import PackedLinear, unpack_quantized

ACTIVATIONS_FP32, ACTIVATIONS_BF16, ACTIVATIONS_INT8, ACTIVATIONS_E4M3 = 0, 1, 2, 3
E4M3_MAX, INT8_MAX = 448.0, 127.0


def dequantized(packed: PackedLinear) -> Tensor:
    """[out, in] fp64: (value - zero_point) * scale."""
    values, scale, zero_point = unpack_quantized(packed)
    columns = packed.group_size
    wide = values.double()
    if zero_point is not None:
        wide = wide - zero_point.double().repeat_interleave(columns, dim=1)
    return wide * scale.double().repeat_interleave(columns, dim=1)


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x: [tokens, in] fp32 -> int8 [tokens, in], scale [tokens, groups] fp32; symmetric, |int8| <= 127."""
    groups = x.float().reshape(x.shape[0], x.shape[1] // group_size, group_size)
    largest = groups.abs().amax(dim=2, keepdim=True)
    factor = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
    values = (groups * factor).round().clamp(-127, 127).to(torch.int8)
    return values.reshape(x.shape), (largest / 127.0).squeeze(2)


def round_activations(x: Tensor, group_size: int, activations: int) -> Tensor:
    """x as the products see it, fp64."""
    if activations == ACTIVATIONS_BF16:
        return x.bfloat16().double()
    if activations == ACTIVATIONS_INT8:
        values, scale = quantize_activations(x, group_size)
        return values.double() * scale.double().repeat_interleave(group_size, dim=1)
    return x.double()


def linear_dense(x: Tensor, weight: Tensor, bias: Tensor | None, activations: int) -> Tensor:
    """x: [tokens, in] fp32, weight: [out, in] -> [tokens, out] fp32."""
    y = round_activations(x, 1, activations) @ weight.double().T
    return (y if bias is None else y + bias.double()).float()


def linear_quantized(x: Tensor, packed: PackedLinear, bias: Tensor | None, activations: int) -> Tensor:
    """x: [tokens, in] fp32 -> [tokens, out] fp32."""
    y = round_activations(x, packed.group_size, activations) @ dequantized(packed).T
    return (y if bias is None else y + bias.double()).float()


def round_e4m3(x: Tensor, input_scale: float) -> Tensor:
    """x: [tokens, in] fp32, rounded to e4m3 times a scale, fp64. input_scale 0: a scale for each token."""
    scale = torch.tensor(input_scale)
    if input_scale == 0.0:
        scale = x.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    stored = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.double() * scale.double()


def linear_fp8(
    x: Tensor, packed: PackedFp8, bias: Tensor | None, input_scale: float, activations: int
) -> Tensor:
    """x: [tokens, in] fp32 -> [tokens, out] fp32."""
    is_e4m3 = activations == ACTIVATIONS_E4M3
    rounded = round_e4m3(x, input_scale) if is_e4m3 else round_activations(x, 1, activations)
    y = rounded @ unpack_fp8(packed).T
    return (y if bias is None else y + bias.double()).float()


def gated_activation(gate_up: Tensor, is_gelu: bool) -> Tensor:
    """gate_up: [tokens, 2 * size], gate then up -> activation(gate) * up, [tokens, size] fp32."""
    gate, up = gate_up.double().chunk(2, dim=1)
    activated = (
        torch.nn.functional.gelu(gate, approximate="tanh") if is_gelu else torch.nn.functional.silu(gate)
    )
    return (activated * up).float()


def write_kv_cache(states: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float) -> None:
    """Keys or values: [tokens, kv_heads, head_size] into cache [blocks, kv_heads, 16, head_size]."""
    stored = states.float() / torch.tensor(scale, dtype=torch.float32)
    if cache.dtype == torch.float8_e4m3fn:
        stored = stored.clamp(-E4M3_MAX, E4M3_MAX)
    elif cache.dtype == torch.int8:
        stored = stored.round().clamp(-INT8_MAX, INT8_MAX)
    blocks, offsets = slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
    cache[blocks, :, offsets] = stored.to(cache.dtype)


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The scalars of `paged_attention`."""

    softmax_scale: float
    key_scale: float = 1.0
    value_scale: float = 1.0
    sliding_window: int = 0
    soft_cap: float = 0.0


def paged_attention(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    settings: AttentionSettings,
) -> Tensor:
    """query: [tokens, heads, head_size] fp32 -> the same shape; see `ModelInput` for the other tensors."""
    output = torch.zeros_like(query)
    for r, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[r]), int(query_start_loc[r + 1])
        if start == end:
            continue
        num_blocks = -(-seq_len // BLOCK_SIZE)
        key, value = (_gather(cache, block_table[r, :num_blocks], seq_len) for cache in caches)
        positions = torch.arange(seq_len - (end - start), seq_len)
        output[start:end] = _attend(query[start:end], key, value, positions, settings)
    return output


def _gather(cache: Tensor, block_ids: Tensor, seq_len: int) -> Tensor:
    """[kv_heads, seq_len, head_size] fp64"""
    blocks = cache[block_ids.long()].double()  # [B, kv_heads, 16, head_size]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, settings: AttentionSettings
) -> Tensor:
    heads_per_kv_head = query.shape[1] // key.shape[0]
    key = key.repeat_interleave(heads_per_kv_head, dim=0) * settings.key_scale
    value = value.repeat_interleave(heads_per_kv_head, dim=0) * settings.value_scale
    # [heads, rows, seq_len]
    scores = query.double().transpose(0, 1) @ key.transpose(1, 2) * settings.softmax_scale
    if settings.soft_cap > 0:
        scores = torch.tanh(scores / settings.soft_cap) * settings.soft_cap
    seen = torch.arange(key.shape[1])
    hidden = seen[None] > positions[:, None]
    if settings.sliding_window > 0:
        hidden |= seen[None] <= positions[:, None] - settings.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(0, 1).float()
