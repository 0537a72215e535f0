"""Frequencies of every rotary variant equal those of transformers, under old and new names."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bitsmith.compile.decoder_config import read_decoder_config
from bitsmith.compile.rotary import inverse_frequencies

_VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
    },
]


@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))
@pytest.mark.parametrize("naming", ["new", "old", "oldest"])
def test_frequencies_equal_transformers(variant: dict[str, Any], naming: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
    new: dict[str, Any] = {"rope_parameters": variant | {"rope_theta": 5e5}}
    oldest = {"type" if name == "rope_type" else name: value for name, value in variant.items()}
    names = {
        "new": new,
        "old": {"rope_theta": 5e5, "rope_scaling": variant},
        "oldest": {"rope_theta": 5e5, "rope_scaling": oldest},
    }
    reference = LlamaConfig(**sizes, **new)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[variant["rope_type"]](reference, torch.device("cpu"))
    (rotary,) = read_decoder_config({"model_type": "llama"} | sizes | names[naming]).rotaries
    torch.testing.assert_close(inverse_frequencies(rotary, 64), expected, rtol=1e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(attention_factor)
