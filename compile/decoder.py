"""The decoder: one module for all supported architectures, over a flat batch of tokens and a paged cache.

Axes: T = tokens of all requests together, R = requests, L = rows for which logits are wanted. Hidden
states and norms are fp32; products and attention are `bitsmith` operators, which know the number formats.
Not known here: where weights come from, whether this runs eagerly or compiled.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.compile.decoder_plan import DecoderPlan, LinearSpec
from bitsmith.compile.linear import Linear
from bitsmith.compile.rotary import inverse_frequencies

Tensors = Mapping[str, Tensor]


class JoinedLinear(nn.Module):
    """Products of the same rows whose outputs stand side by side; one product where they could be fused."""

    def __init__(self, name: str, specs: Sequence[LinearSpec], tensors: Tensors) -> None:
        super().__init__()
        parts = (Linear(f"{name}.{index}", spec, tensors) for index, spec in enumerate(specs))
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [T, in] -> [T, sum of out]."""
        outputs = [part(hidden) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the weight is the whole gain (a stored +1 is in it)."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        mean_square = hidden.pow(2).mean(-1, keepdim=True)
        return hidden * torch.rsqrt(mean_square + self.eps) * self.weight


class RotaryAngles(nn.Module):
    """Cosines and sines of each token's position."""

    inverse_frequencies: Tensor

    def __init__(self, frequencies: Tensor, attention_factor: float) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", frequencies)
        self.attention_factor = attention_factor

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [T] -> cos, sin: [T, 1, head_size / 2] fp32."""
        angles = (positions.float()[:, None] * self.inverse_frequencies)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (first half, second half) pairs. heads: [T, H, head_size]; cos, sin: [T, 1, head_size / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Projections, norms of heads, rotation, cache write, and attention that reads only the cache."""

    def __init__(self, plan: DecoderPlan, layer_index: int, tensors: Tensors) -> None:
        super().__init__()
        name, config = f"layers.{layer_index}", plan.config
        self.config = config
        self.sliding_window = config.sliding_windows[layer_index]
        self.key_scale, self.value_scale = plan.kv_scales[layer_index]
        self.qkv = JoinedLinear(f"{name}.qkv", plan.linears[f"{name}.qkv"], tensors)
        self.output = JoinedLinear(f"{name}.output", plan.linears[f"{name}.output"], tensors)
        if config.qk_norm:
            self.head_norm = RMSNorm(tensors[f"{name}.head_norm.weight"], config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        lookup: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """hidden: [T, hidden_size]. lookup: block_table, query_start_loc, seq_lens."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = self.qkv(hidden).unflatten(1, (num_heads + 2 * num_kv_heads, config.head_size))
        rotated, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if config.qk_norm:
            rotated = self.head_norm(rotated)
        query, key = torch.split(rotate(rotated, *angles), [num_heads, num_kv_heads], dim=1)
        key_cache, value_cache = caches
        torch.ops.bitsmith.write_kv_cache(
            key, value, key_cache, value_cache, slot_mapping, self.key_scale, self.value_scale
        )
        block_table, query_start_loc, seq_lens = lookup
        attended = torch.ops.bitsmith.paged_attention(
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            config.softmax_scale,
            self.key_scale,
            self.value_scale,
            self.sliding_window,
            config.attention_soft_cap,
        )
        projected: Tensor = self.output(attended.flatten(1))
        return projected


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, plan: DecoderPlan, name: str, tensors: Tensors) -> None:
        super().__init__()
        self.is_gelu = plan.config.activation == "gelu_tanh"
        self.gate_up = JoinedLinear(f"{name}.gate_up", plan.linears[f"{name}.gate_up"], tensors)
        self.down = JoinedLinear(f"{name}.down", plan.linears[f"{name}.down"], tensors)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = torch.ops.bitsmith.gated_activation(self.gate_up(hidden), self.is_gelu)
        projected: Tensor = self.down(gated)
        return projected


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before (and in Gemma after), each added to the residual stream."""

    def __init__(self, plan: DecoderPlan, layer_index: int, tensors: Tensors) -> None:
        super().__init__()
        name, config = f"layers.{layer_index}", plan.config

        def norm(part: str) -> RMSNorm:
            return RMSNorm(tensors[f"{name}.{part}.weight"], config.rms_norm_eps)

        self.attention_norm, self.mlp_norm = norm("attention_norm"), norm("mlp_norm")
        self.attention_post_norm: nn.Module = nn.Identity()
        self.mlp_post_norm: nn.Module = nn.Identity()
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm("attention_post_norm"), norm("mlp_post_norm")
        self.attention = Attention(plan, layer_index, tensors)
        self.mlp = GatedMLP(plan, name, tensors)
        self.rotary_index = config.layer_rotaries[layer_index]

    def forward(
        self,
        hidden: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        caches: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        lookup: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        normed = self.attention_norm(hidden)
        attended = self.attention(normed, angles[self.rotary_index], caches, slot_mapping, lookup)
        hidden = hidden + self.attention_post_norm(attended)
        added: Tensor = hidden + self.mlp_post_norm(self.mlp(self.mlp_norm(hidden)))
        return added


class Decoder(nn.Module):
    """Token ids in, logits of the wanted rows out; K and V of every token are left in the caches.

    A tied head that is not quantized has no tensor of its own: it reads the embedding's.
    """

    embedding: Tensor

    def __init__(self, plan: DecoderPlan, tensors: Tensors) -> None:
        super().__init__()
        config = plan.config
        self.config: DecoderConfig = config
        self.register_buffer("embedding", tensors["embedding"])
        self.rotaries = nn.ModuleList(
            RotaryAngles(tensors[f"rotaries.{index}.inverse_frequencies"], rotary.attention_factor)
            for index, rotary in enumerate(config.rotaries)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(plan, layer_index, tensors) for layer_index in range(config.num_layers)
        )
        self.final_norm = RMSNorm(tensors["final_norm.weight"], config.rms_norm_eps)
        shared = {"head.0.weight": tensors["embedding"]} if plan.shares_embedding else {}
        self.head = JoinedLinear("head", plan.linears["head"], {**tensors, **shared})

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        logits_indices: Tensor,
        key_caches: list[Tensor],
        value_caches: list[Tensor],
    ) -> Tensor:
        """The first seven are ModelInput's, in its order. Caches: for each layer
        [num_blocks, num_kv_heads, BLOCK_SIZE, head_size]. Returns [L, vocab_size] fp32.
        """
        config = self.config
        hidden = nn.functional.embedding(token_ids, self.embedding).float()
        if config.embedding_scale != 1.0:
            hidden = hidden * config.embedding_scale
        angles = [rotary(positions) for rotary in self.rotaries]
        lookup = (block_table, query_start_loc, seq_lens)
        for layer, key_cache, value_cache in zip(self.layers, key_caches, value_caches, strict=True):
            hidden = layer(hidden, angles, (key_cache, value_cache), slot_mapping, lookup)
        # Only the wanted rows go through the head: it is the largest product of all.
        logits: Tensor = self.head(self.final_norm(hidden[logits_indices]))
        if config.final_soft_cap:
            logits = torch.tanh(logits / config.final_soft_cap) * config.final_soft_cap
        return logits


def rotary_tensors(config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors of a decoder that are computed, not read from a checkpoint."""
    return {
        f"rotaries.{index}.inverse_frequencies": inverse_frequencies(rotary, config.head_size)
        for index, rotary in enumerate(config.rotaries)
    }
