"""`config.json` of a TensorRT-LLM checkpoint, written from a Hugging Face decoder's configuration."""

from typing import Any

from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.compile.rotary import RotaryConfig
from bitsmith.compile.tensorrt_model import EngineModel, Family
from bitsmith.compile.tensorrt_quantization import QuantConfig
from bitsmith.compile.tensorrt_release import Release
from bitsmith.core.errors import Refused
from bitsmith.core.versions import installed_version

_ARCHITECTURES: dict[str, tuple[str, Family]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3"),
}
_SEQUENCE_LENGTH = 8192  # what TensorRT-LLM takes for Qwen where the model does not say


def engine_model(
    decoder: DecoderConfig, quant: QuantConfig, dtype: str, tp_size: int, pp_size: int
) -> EngineModel:
    """The checkpoint's model. Tied Llama-like models get a copy of the head; Gemma shares its table."""
    if decoder.model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise Refused(f"model_type {decoder.model_type!r} cannot be exported to TensorRT-LLM ({known} can).")
    architecture, family = _ARCHITECTURES[decoder.model_type]
    is_gemma = family in ("gemma2", "gemma3")
    return EngineModel(
        architecture=architecture,
        family=family,
        dtype=dtype,
        hidden_size=decoder.hidden_size,
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        intermediate_size=decoder.intermediate_size,
        vocab_size=decoder.vocab_size,
        tp_size=tp_size,
        pp_size=pp_size,
        attn_bias=decoder.qkv_bias,
        mlp_bias=decoder.mlp_bias,
        qk_layernorm=decoder.qk_norm,
        share_embedding_table=is_gemma,
        use_parallel_embedding=is_gemma and tp_size > 1,
        quant=quant,
    )


def engine_config(decoder: DecoderConfig, model: EngineModel, release: Release) -> dict[str, Any]:
    """Everything the model code of these families reads, written out, so that no default decides."""
    rotary = global_rotary(decoder)
    body: dict[str, Any] = {
        "producer": {"name": "bitsmith", "version": installed_version("bitsmith")},
        "architecture": model.architecture,
        "dtype": model.dtype,
        "logits_dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_size": model.head_size,
        "hidden_act": "gelu" if model.is_gemma else "silu",
        "norm_epsilon": decoder.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": decoder.max_context,
        "rotary_base": rotary.theta,
        "rotary_scaling": _rotary_scaling(rotary),
        "attn_bias": model.attn_bias,
        "mlp_bias": model.mlp_bias,
        "qk_layernorm": model.qk_layernorm,
        "use_parallel_embedding": model.use_parallel_embedding,
        "embedding_sharding_dim": model.embedding_sharding_dim,
        "mapping": {"world_size": model.world_size, "tp_size": model.tp_size, "pp_size": model.pp_size},
        "quantization": model.quant.to_json(),
    }
    if release.is_legacy or model.is_gemma:  # left the base configuration with 1.0
        body["share_embedding_table"] = model.share_embedding_table
    return body | _family_keys(decoder, model)


def _family_keys(decoder: DecoderConfig, model: EngineModel) -> dict[str, Any]:
    if model.family in ("qwen2", "qwen3"):
        return {
            "qwen_type": model.family,
            "seq_length": _SEQUENCE_LENGTH,
            "tie_word_embeddings": decoder.is_tied,
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
        }
    if not model.is_gemma:
        return {"residual_mlp": False}
    body: dict[str, Any] = {
        "query_pre_attn_scalar": round(decoder.softmax_scale**-2, 6),
        "final_logit_softcapping": decoder.final_soft_cap or None,
        "inter_layernorms": True,
    }
    if model.family == "gemma2":
        return body | {"attn_logit_softcapping": decoder.attention_soft_cap or None}
    window, pattern = sliding_pattern(decoder)
    return body | {
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": _local_rotary(decoder).theta,
    }


def global_rotary(decoder: DecoderConfig) -> RotaryConfig:
    """Of the layers that see everything; of all layers where they are alike."""
    for window, index in zip(decoder.sliding_windows, decoder.layer_rotaries, strict=True):
        if window == 0:
            return decoder.rotaries[index]
    return decoder.rotaries[decoder.layer_rotaries[-1]]


def _local_rotary(decoder: DecoderConfig) -> RotaryConfig:
    for window, index in zip(decoder.sliding_windows, decoder.layer_rotaries, strict=True):
        if window:
            return decoder.rotaries[index]
    return decoder.rotaries[decoder.layer_rotaries[0]]


def sliding_pattern(decoder: DecoderConfig) -> tuple[int, int]:
    """(window, pattern): every `pattern`-th layer is global. Raises Refused for another arrangement."""
    windows = decoder.sliding_windows
    window = max(windows)
    pattern = next((index + 1 for index, size in enumerate(windows) if size == 0), len(windows) + 1)
    expected = tuple(0 if (index + 1) % pattern == 0 else window for index in range(len(windows)))
    if windows != expected:
        raise Refused("The sliding-window layers do not repeat in a fixed pattern; TensorRT-LLM needs one.")
    return window, pattern


def _rotary_scaling(rotary: RotaryConfig) -> dict[str, Any] | None:
    """Both names of the type: releases differ in the one they read."""
    if rotary.rope_type == "default":
        return None
    scaling: dict[str, Any] = {
        "type": rotary.rope_type,
        "rope_type": rotary.rope_type,
        "factor": rotary.factor,
    }
    if rotary.rope_type == "linear":
        return scaling
    if rotary.rope_type == "llama3":
        return scaling | {
            "low_freq_factor": rotary.low_freq_factor,
            "high_freq_factor": rotary.high_freq_factor,
            "original_max_position_embeddings": rotary.original_max_positions,
        }
    raise Refused(
        f"rope_type {rotary.rope_type!r} cannot be exported as an engine: the contract does not say how "
        "trtllm-build reads it. Use --target tensorrt-llm-pytorch."
    )
