"""Which weights a checkpoint must have, and what becomes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitsmith.compile.decoder_config import read_decoder_config
from bitsmith.compile.packing import (
    _pack_part,
    check_names,
    expected_names,
    num_modules,
    pack_modules,
)
from bitsmith.core.errors import Refused
from bitsmith.ops.packing import PackedLinear
from bitsmith.ops.reference import dequantized
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

ModelMaker = Callable[..., Path]


def _copy(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a model directory with weights added, or removed where the change is None."""
    weights = load_file(source / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_expected_names_are_those_that_transformers_writes(model_type: str, make_model: ModelMaker) -> None:
    source = open_weights(make_model(model_type))
    config = read_decoder_config(source.config)
    assert expected_names(config) == set(source.names)
    check_names(source, config)
    assert sum(1 for _ in pack_modules(source, config, "fp32")) == num_modules(config)


def test_a_missing_weight_is_named(make_model: ModelMaker, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = open_weights(_copy(make_model("llama"), tmp_path, **{name: None}))
    with pytest.raises(Refused, match=name):
        check_names(source, read_decoder_config(source.config))


def test_a_weight_that_would_not_be_used_is_named(make_model: ModelMaker, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    source = open_weights(_copy(make_model("llama"), tmp_path, **{name: torch.zeros(64)}))
    with pytest.raises(Refused, match=name):
        check_names(source, read_decoder_config(source.config))


def test_a_tied_head_has_no_tensor_of_its_own(make_model: ModelMaker) -> None:
    source = open_weights(make_model("qwen3", tie_word_embeddings=True))
    config = read_decoder_config(source.config)
    (head,) = (module for module in pack_modules(source, config, "bf16") if module.name == "head")
    assert (head.tensors, head.specs[0].out_features) == ({}, 301)


def test_an_int8_head_is_close_to_the_embedding_that_stays(make_model: ModelMaker) -> None:
    source = open_weights(make_model("qwen3", tie_word_embeddings=True))
    config = read_decoder_config(source.config)
    modules = {module.name: module for module in pack_modules(source, config, "int8", "int8")}
    (spec,), tensors = modules["head"].specs, modules["head"].tensors
    assert (spec.num_bits, spec.group_size, spec.activations) == (8, 64, "int8")
    packed = PackedLinear(
        tensors["head.0.weight"], tensors["head.0.scale"], None, spec.in_features, spec.out_features, 64, 8
    )
    embedding = source.tensor("model.embed_tokens.weight").double()
    step = embedding.abs().view(301, -1, 64).amax(dim=2, keepdim=True) / 127.5
    difference = (dequantized(packed) - embedding).view(301, -1, 64).abs()
    assert bool((difference <= step * 1.001).all())
    assert float(difference.max()) > 0
    assert modules["embedding"].tensors["embedding"].shape == embedding.shape


def test_weights_keep_bf16_and_are_rounded_only_where_asked(make_model: ModelMaker) -> None:
    def num_bits(dtype: torch.dtype, activations: str) -> set[int]:
        source = open_weights(make_model("llama", dtype=dtype))
        config = read_decoder_config(source.config)
        modules = pack_modules(source, config, activations)  # type: ignore[arg-type]
        return {spec.num_bits for module in modules for spec in module.specs}

    assert num_bits(torch.bfloat16, "fp32") == {16}
    assert num_bits(torch.float32, "fp32") == {32}
    assert num_bits(torch.float32, "bf16") == {16}


@pytest.mark.parametrize(("group_size", "packed_size"), [(128, 128), (192, 64), (576, 64), (72, 72)])
def test_wide_groups_are_split_for_int8_activations_and_only_for_them(
    group_size: int, packed_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (16, group_size * 2), generator=generator, dtype=torch.int8)
    scale = torch.rand(16, 2, generator=generator) + 0.1
    weight = QuantizedWeight(values, scale, None, 4, group_size)
    assert _pack_part("part", weight, "int8", False, {}).group_size == packed_size
    assert _pack_part("part", weight, "bf16", False, {}).group_size == group_size
    assert torch.equal(weight.with_group_size(8).dequantize(), weight.dequantize())
