"""What a decoder computes, read from a Hugging Face config.json.

One configuration type for all supported architectures: they differ in switches, not in code. A feature
that this decoder does not have is refused by its name in config.json. Not known here: weights, operators.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bitsmith.compile.rotary import RotaryConfig, parse_rotary
from bitsmith.core.errors import Refused

Activation = Literal["silu", "gelu_tanh"]

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys that say nothing about the forward pass, beside those of every transformers configuration.
_HARMLESS_KEYS = frozenset(
    {
        "attention_dropout", "auto_map", "bos_token_id", "cache_implementation", "dtype", "embd_pdrop",
        "eos_token_id", "initializer_range", "is_llama_config", "max_window_layers",
        "original_max_position_embeddings", "pad_token_id", "pretraining_tp", "quantization_config",
        "resid_pdrop", "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
        "use_sliding_window",
    }
)  # fmt: skip
_READ_KEYS = frozenset(
    {
        "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_act",
        "hidden_activation", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
        "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "partial_rotary_factor", "query_pre_attn_scalar", "rms_norm_eps", "rope_local_base_freq",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "sliding_window_pattern",
        "tie_word_embeddings", "vocab_size",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Switches and sizes of one decoder; every value is resolved.

    sliding_windows: for each layer the number of keys that a query sees, itself included; 0 = all.
    layer_rotaries: for each layer an index into `rotaries`. norm_plus_one: the stored norm weight is the
    gain minus one. qk_norm: query and key heads are normed before rotation. post_norms: attention's and
    the MLP's outputs are normed before they are added. soft caps: 0 = none.
    max_context: positions that the model was made for; context_reason: what in config.json decided it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    activation: Activation
    is_tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    is_fused: bool
    qk_norm: bool
    norm_plus_one: bool
    post_norms: bool
    embedding_scale: float
    softmax_scale: float
    attention_soft_cap: float
    final_soft_cap: float
    sliding_windows: tuple[int, ...]
    rotaries: tuple[RotaryConfig, ...]
    layer_rotaries: tuple[int, ...]
    max_context: int
    context_reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json`; `from_json` is the inverse."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "DecoderConfig":
        lists = {name: tuple(plain[name]) for name in ("sliding_windows", "layer_rotaries")}
        rotaries = tuple(RotaryConfig(**rotary) for rotary in plain["rotaries"])
        return cls(**{**plain, **lists, "rotaries": rotaries})


def read_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json. Raises Refused naming the first thing that is not supported."""
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise Refused(
            f"config.json: model_type {model_type!r} cannot be compiled "
            f"(supported: {', '.join(SUPPORTED_MODEL_TYPES)})."
        )
    full = _complete(config)
    _refuse_unknown(full)
    is_gemma = model_type in ("gemma2", "gemma3_text")
    num_heads, head_size = int(full["num_attention_heads"]), _head_size(full)
    rotaries, layer_rotaries = _read_rotaries(full)
    max_context, context_reason = _read_context(full, rotaries)
    attention_bias = bool(full.get("attention_bias"))
    return DecoderConfig(
        model_type=model_type,
        vocab_size=int(full["vocab_size"]),
        hidden_size=int(full["hidden_size"]),
        intermediate_size=int(full["intermediate_size"]),
        num_layers=int(full["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(full.get("num_key_value_heads") or num_heads),
        head_size=head_size,
        rms_norm_eps=float(full["rms_norm_eps"]),
        activation=_read_activation(full),
        is_tied=bool(full["tie_word_embeddings"]),
        # Qwen2 always has q, k, v biases and says so nowhere in its configuration.
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(full.get("mlp_bias")),
        is_fused=model_type == "phi3",
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        norm_plus_one=is_gemma,
        post_norms=is_gemma,
        embedding_scale=float(full["hidden_size"]) ** 0.5 if is_gemma else 1.0,
        softmax_scale=float(full["query_pre_attn_scalar"] if is_gemma else head_size) ** -0.5,
        attention_soft_cap=float(full.get("attn_logit_softcapping") or 0.0),
        final_soft_cap=float(full.get("final_logit_softcapping") or 0.0),
        sliding_windows=_read_windows(full, max_context),
        rotaries=rotaries,
        layer_rotaries=layer_rotaries,
        max_context=max_context,
        context_reason=context_reason,
    )


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with transformers' defaults filled in and old names standardised.

    transformers leaves values that equal its defaults out of config.json, so only its own classes know
    what such a file means; reading it through them also makes the reference and the engine agree.
    """
    from transformers import AutoConfig

    given = {name: value for name, value in config.items() if name not in ("quantization_config", "auto_map")}
    try:
        full: dict[str, Any] = AutoConfig.for_model(**given).to_dict()
    except Exception as error:  # transformers raises many types for an invalid configuration
        raise Refused(f"config.json is not a valid {given['model_type']} configuration: {error}") from error
    return full


def _refuse_unknown(full: Mapping[str, Any]) -> None:
    from transformers import PretrainedConfig

    known = _READ_KEYS | _HARMLESS_KEYS | PretrainedConfig().to_dict().keys()
    for name, value in full.items():
        if name not in known and not name.startswith("_") and value:
            raise Refused(
                f"config.json: {name!r} ({value!r}) is not known to this decoder. If it does not change what "
                "the model computes, remove it from config.json."
            )
    if full["model_type"] == "gemma3_text" and full.get("attn_logit_softcapping"):
        raise Refused("config.json: attn_logit_softcapping is set, but gemma3_text models do not apply one.")


def _head_size(full: Mapping[str, Any]) -> int:
    head_size = int(full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"])
    if head_size % 2:
        raise Refused(f"config.json: head_dim {head_size} is odd; rotary embedding needs pairs.")
    return head_size


def _read_activation(full: Mapping[str, Any]) -> Activation:
    name = full.get("hidden_activation") or full.get("hidden_act")
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise Refused(f"config.json: activation {name!r} is not supported (supported: {supported}).")
    return _ACTIVATIONS[name]


def _layer_types(full: Mapping[str, Any]) -> list[str]:
    """For each layer "full_attention" or "sliding_attention"."""
    num_layers = int(full["num_hidden_layers"])
    given = full.get("layer_types")
    if given is None:
        # Mistral and Phi-3 have one window for all layers; Llama has none.
        has_window = full["model_type"] in ("mistral", "phi3") and full.get("sliding_window")
        given = ["sliding_attention" if has_window else "full_attention"] * num_layers
    unknown = sorted(set(given) - {"full_attention", "sliding_attention"})
    if unknown:
        raise Refused(f"config.json: layer type {unknown[0]!r} is not supported.")
    if len(given) != num_layers:
        raise Refused(f"config.json: layer_types has {len(given)} entries for {num_layers} layers.")
    return list(given)


def _read_windows(full: Mapping[str, Any], max_context: int) -> tuple[int, ...]:
    window = int(full.get("sliding_window") or 0)
    if window >= max_context:  # sees everything: the same as no window
        window = 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in _layer_types(full))


def _read_rotaries(full: Mapping[str, Any]) -> tuple[tuple[RotaryConfig, ...], tuple[int, ...]]:
    """The distinct rotary variants, and for each layer which of them it uses."""
    parameters, max_positions = full["rope_parameters"], int(full["max_position_embeddings"])
    kinds = _layer_types(full)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        by_kind = {kind: parse_rotary(parameters[kind], max_positions) for kind in sorted(set(kinds))}
    else:
        by_kind = dict.fromkeys(kinds, parse_rotary(parameters, max_positions))
    rotaries = tuple(dict.fromkeys(by_kind.values()))
    return rotaries, tuple(rotaries.index(by_kind[kind]) for kind in kinds)


def _read_context(full: Mapping[str, Any], rotaries: tuple[RotaryConfig, ...]) -> tuple[int, str]:
    """Positions that the model was made for, and the sentence that says what decided it."""
    max_positions = int(full["max_position_embeddings"])
    for rotary in rotaries:
        stretched = int(rotary.original_max_positions * rotary.factor)
        if rotary.rope_type == "yarn" and stretched > max_positions:
            return stretched, (
                f"YaRN factor {rotary.factor:g} on original_max_position_embeddings "
                f"{rotary.original_max_positions} (max_position_embeddings says {max_positions})"
            )
    return max_positions, f"max_position_embeddings {max_positions}"
