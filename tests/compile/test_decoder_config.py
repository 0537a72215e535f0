"""config.json -> DecoderConfig: defaults, old names, and refusals by name."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from bitsmith.compile.decoder_config import SUPPORTED_MODEL_TYPES, DecoderConfig, read_decoder_config
from bitsmith.core.errors import Refused

_SMALL: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _config(model_type: str = "llama", **overrides: Any) -> dict[str, Any]:
    return {"model_type": model_type} | _SMALL | overrides


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_a_full_and_a_shortened_file_mean_the_same(model_type: str) -> None:
    sizes = _SMALL | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    written = AutoConfig.for_model(model_type, **sizes)
    full = json.loads(json.dumps(written.to_dict()))
    shortened = json.loads(written.to_json_string())  # without what equals transformers' defaults
    config = read_decoder_config(full)
    assert read_decoder_config(shortened) == config
    assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial",
        ),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_experts": 8}, "num_experts"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        read_decoder_config(_config() | overrides)


def test_an_unknown_key_that_is_switched_off_does_not_matter() -> None:
    assert read_decoder_config(_config(rope_interleaved=False)) == read_decoder_config(_config())


def test_layers_with_and_without_a_window() -> None:
    windows = {"sliding_window": 16}
    assert read_decoder_config(_config("mistral", **windows)).sliding_windows == (16, 16, 16, 16)
    assert read_decoder_config(_config("gemma2", **windows)).sliding_windows == (16, 0, 16, 0)
    qwen = _config("qwen2", **windows, use_sliding_window=True, max_window_layers=3)
    assert read_decoder_config(qwen).sliding_windows == (0, 0, 0, 16)
    assert read_decoder_config(_config("qwen2", **windows)).sliding_windows == (0, 0, 0, 0)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert read_decoder_config(_config("mistral", sliding_window=256)).sliding_windows == (0, 0, 0, 0)


def test_gemma3_has_two_rotary_bases() -> None:
    config = read_decoder_config(_config("gemma3_text", sliding_window_pattern=2))
    assert [config.rotaries[index].theta for index in config.layer_rotaries] == [1e4, 1e6, 1e4, 1e6]


def test_the_context_and_what_decided_it() -> None:
    plain = read_decoder_config(_config())
    assert (plain.max_context, plain.context_reason) == (256, "max_position_embeddings 256")
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    stretched = read_decoder_config(_config(rope_scaling=scaling))
    assert stretched.max_context == 1024
    assert "YaRN factor 4" in stretched.context_reason
