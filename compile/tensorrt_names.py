"""Names on both sides: Hugging Face's modules and TensorRT-LLM's, for the decoders known here."""

from bitsmith.compile.tensorrt_layout import module_name

# TensorRT-LLM's linear below a layer -> Hugging Face's linears below a layer, in the order of their rows.
# `fc` is the activated branch.
LINEARS: dict[str, tuple[str, ...]] = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
NORMS: dict[str, str] = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def hf_linear_names(layer: int, name: str) -> tuple[str, ...]:
    """Hugging Face module names of a TensorRT-LLM linear.

    >>> hf_linear_names(3, "mlp.fc")
    ('model.layers.3.mlp.gate_proj',)
    """
    return tuple(f"model.layers.{layer}.{part}" for part in LINEARS[name])


def hf_norm_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{NORMS[name]}"


def kv_scale_name(index: int) -> str:
    """index: the layer's index in its rank."""
    return module_name(index, "attention.kv_cache_scaling_factor")
