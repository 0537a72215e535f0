"""GGUF metadata -> Hugging Face config.json, for the architectures that are known exactly.

Field names follow the published config files, so that older transformers releases read them too. What
the metadata says and this module does not understand is refused, not dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitsmith.core.errors import Refused

Metadata = Mapping[str, Any]

# Llama 3.1 and later store the inverse-frequency divisors as a tensor instead of the formula's inputs.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps onto a Hugging Face class."""

    model_type: str
    class_name: str
    is_gemma: bool = False  # GELU, embedding scale, four norms per layer, norms stored as weight + 1
    has_permuted_rotary: bool = False  # q and k rows interleaved for GGUF's rotary variant
    has_qkv_bias: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", has_permuted_rotary=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", is_gemma=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", is_gemma=True),
}


def architecture_of(metadata: Metadata) -> Architecture:
    name = metadata.get("general.architecture")
    found = ARCHITECTURES.get(str(name))
    if found is None:
        raise Refused(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}."
        )
    if metadata.get(f"{name}.expert_count", 0):
        raise Refused(
            f"GGUF field {name}.expert_count is {metadata[f'{name}.expert_count']}: no mixture of experts."
        )
    if metadata.get("split.count", 1) > 1:
        raise Refused("A GGUF model split over several files is not supported; merge it with gguf-split.")
    return found


def build_config(
    metadata: Metadata,
    *,
    vocab_size: int,
    is_tied: bool,
    has_attention_bias: bool,
    rope_divisors: np.ndarray | None,
) -> dict[str, Any]:
    """config.json of the model. rope_divisors: tensor `rope_freqs.weight`, [head_size / 2], if there."""
    arch = architecture_of(metadata)
    fields = _Fields(metadata)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", default=hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, default=head_dim) != head_dim:
            raise Refused(
                f"GGUF field {fields.prefix}.{name} differs from the head size {head_dim}: not supported."
            )
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", default=10000.0),
        "rope_scaling": _rope_scaling(fields, head_dim, rope_divisors),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if arch.is_gemma:
        return config | _gemma_fields(fields, arch, config)
    config["hidden_act"] = "silu"
    if arch.model_type in ("llama", "qwen3"):
        config["attention_bias"] = has_attention_bias
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: the ids at which generation starts and ends."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    unique = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    body: dict[str, Any] = {
        "_from_model_config": True,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in body.items() if value not in (None, [])}


class _Fields:
    """Metadata under the architecture's own prefix, with types checked."""

    def __init__(self, metadata: Metadata) -> None:
        self.prefix = str(metadata["general.architecture"])
        self._metadata = metadata

    def find(self, name: str) -> Any:
        return self._metadata.get(f"{self.prefix}.{name}")

    def integer(self, name: str, *, default: int | None = None) -> int:
        value = self.find(name)
        if value is None:
            value = default
        if isinstance(value, Sequence) and len(set(value)) == 1:
            value = value[0]  # some writers store one number per layer
        if not isinstance(value, int):
            raise Refused(f"GGUF field {self.prefix}.{name} is {value!r}; an integer is needed.")
        return value

    def real(self, name: str, *, default: float | None = None) -> float:
        value = self.find(name)
        if value is None:
            value = default
        if not isinstance(value, float | int):
            raise Refused(f"GGUF field {self.prefix}.{name} is {value!r}; a number is needed.")
        # The file holds fp32; its shortest decimal form is what the original config said (1e-05).
        return float(str(np.float32(value)))


def _gemma_fields(fields: _Fields, arch: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    period = 2 if arch.model_type == "gemma2" else 6
    # The file does not hold the attention scale. Only the 27B models (46 and 62 layers) scale by
    # hidden size / heads instead of the head size.
    is_27b = num_layers == (46 if arch.model_type == "gemma2" else 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim
    soft_caps = {
        "attn_logit_softcapping": fields.find("attn_logit_softcapping"),
        "final_logit_softcapping": fields.find("final_logit_softcapping"),
    }
    extra: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (index + 1) % period == 0 else "sliding_attention"
            for index in range(num_layers)
        ],
        **soft_caps,
    }
    if arch.model_type == "gemma3_text":
        extra["rope_local_base_freq"] = 10000.0
    return extra


def _rope_scaling(fields: _Fields, head_dim: int, divisors: np.ndarray | None) -> dict[str, Any] | None:
    kind = fields.find("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise Refused(f"GGUF field {fields.prefix}.rope.scaling.type is {kind!r}; known are none and linear.")
    if divisors is not None:
        return _llama3_scaling(fields, head_dim, divisors)
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.real("rope.scaling.factor")}
    return None


def _llama3_scaling(fields: _Fields, head_dim: int, divisors: np.ndarray) -> dict[str, Any]:
    """The formula's inputs, found again from its output and checked against every value of it."""
    factor = float(divisors.max())
    theta = fields.real("rope.freq_base", default=10000.0)
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-4):
        raise Refused(
            "GGUF tensor rope_freqs.weight does not follow the llama3 rule: this rotary form is unknown."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
