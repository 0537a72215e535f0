"""Shapes and dtypes of the operators' results, for torch.export; nothing is computed here."""

import torch
from torch import Tensor


def register_fakes() -> None:
    """Called once, after the library's schemas exist."""
    register = torch.library.register_fake
    register("bitsmith::linear_dense")(_linear_dense)
    register("bitsmith::linear_quantized")(_linear_quantized)
    register("bitsmith::linear_fp8")(_linear_fp8)
    register("bitsmith::gated_activation")(_gated_activation)
    register("bitsmith::write_kv_cache")(_write_kv_cache)
    register("bitsmith::paged_attention")(_paged_attention)


def _linear_dense(x: Tensor, weight: Tensor, bias: Tensor | None, activations: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _linear_quantized(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    num_bits: int,
    activations: int,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


def _linear_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    in_features: int,
    input_scale: float,
    activations: int,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _gated_activation(gate_up: Tensor, is_gelu: bool) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _write_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    return None


def _paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    key_scale: float,
    value_scale: float,
    sliding_window: int,
    soft_cap: float,
) -> Tensor:
    return query.new_empty(query.shape)
