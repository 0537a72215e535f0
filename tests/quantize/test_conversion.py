"""Checkpoints put into another format: the same weights bit for bit, or a refusal that names the tensor."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bitsmith.core.artifact import find_finished
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import read_manifest, verify_files
from bitsmith.core.model_ref import ModelSource, source_digest
from bitsmith.quantize import conversion
from bitsmith.quantize.conversion import ConvertJob, convert_checkpoint, plan_convert
from bitsmith.quantize.packed_format import FORMATS, FormatName
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

QUERY = "model.layers.0.self_attn.q_proj"
Weights = dict[str, QuantizedWeight]
PAIRS = [
    (*pair, symmetric)
    for pair in itertools.permutations(FORMATS, 2)
    for symmetric in (True, False)
    if symmetric or "gptq" not in pair  # version 1 is symmetric
]


def convert(path: Path, form: FormatName, out: Path, *, strict: bool = False) -> Path:
    job = ConvertJob(ModelSource("packed", path), form, out, strict)
    convert_checkpoint(job, plan_convert(job))
    return out


@pytest.mark.parametrize(("source", "target", "symmetric"), PAIRS)
def test_weights_and_all_other_tensors_stay_what_they_are(
    source: FormatName, target: FormatName, symmetric: bool, packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    weights = packed.rounded_weights(model, symmetric=symmetric)
    path = packed.write_packed(tmp_path / "source", model, weights, source)
    converted = open_weights(convert(path, target, tmp_path / "out", strict=True))
    original = open_weights(model)
    assert set(converted.names) == set(original.names)
    for name in converted.names:
        module = name.removesuffix(".weight")
        expected = weights[module].dequantize() if module in weights else original.tensor(name)
        assert torch.equal(converted.dequantized(name), expected), name
        if module in weights:
            found = converted.linear(module)
            assert isinstance(found, QuantizedWeight) and found.is_symmetric == symmetric


def test_there_and_back_gives_the_same_bytes(packed: ModuleType, model: Path, tmp_path: Path) -> None:
    rounded: Weights = packed.rounded_weights(model, symmetric=True)
    weights = {name: replace(weight, scale=weight.scale.bfloat16()) for name, weight in rounded.items()}
    path = packed.write_packed(tmp_path / "source", model, weights, "compressed-tensors")
    start = convert(convert(path, "awq", tmp_path / "awq"), "compressed-tensors", tmp_path / "first")
    back = convert(convert(start, "gptq", tmp_path / "gptq"), "compressed-tensors", tmp_path / "second")
    assert (start / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()
    assert (start / "config.json").read_bytes() == (back / "config.json").read_bytes()
    assert not (back / "quantize_config.json").exists()
    assert open_weights(start).linear(QUERY).scale.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_it_is_an_artifact_whose_parent_is_the_source(
    packed: ModuleType, model: Path, tmp_path: Path, fresh_process: None
) -> None:
    weights = packed.rounded_weights(model, symmetric=True)
    path = packed.write_packed(tmp_path / "source", model, weights, "gptq_v2")
    out = convert(path, "gptq", tmp_path / "out")
    manifest = read_manifest(out)
    verify_files(out, manifest)
    assert manifest.kind == "quantized-checkpoint"
    assert manifest.parents == {"checkpoint": source_digest(path)}
    assert manifest.details["num_modules"] == len(weights)
    plan = plan_convert(ConvertJob(ModelSource("packed", path), "gptq", out))
    assert find_finished(out, plan.stage_key) is not None
    other = plan_convert(ConvertJob(ModelSource("packed", path), "awq", out))
    assert find_finished(out, other.stage_key) is None
    settings = json.loads((out / "quantize_config.json").read_text())
    assert settings == json.loads((out / "config.json").read_text())["quantization_config"]
    assert (settings["checkpoint_format"], settings["sym"], settings["group_size"]) == ("gptq", True, 32)
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_channels_stay_channels_and_unlike_groups_become_the_largest_that_all_share(
    packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    whole: Weights = packed.rounded_weights(model, symmetric=True, group_size=32)
    by_row = {
        name: QuantizedWeight(weight.values, weight.scale[:, :1].contiguous(), None, 4, weight.in_features)
        for name, weight in whole.items()
    }
    path = packed.write_packed(tmp_path / "rows", model, by_row, "compressed-tensors")
    settings = json.loads((convert(path, "awq", tmp_path / "awq") / "config.json").read_text())
    assert settings["quantization_config"]["group_size"] == -1
    mixed = whole | {QUERY: by_row[QUERY]}  # groups of 32, and one of 64
    path = packed.write_packed(tmp_path / "mixed", model, mixed, "compressed-tensors")
    converted = open_weights(convert(path, "awq", tmp_path / "mixed-awq"))
    weight = converted.linear(QUERY)
    assert isinstance(weight, QuantizedWeight) and weight.group_size == 32
    assert torch.equal(weight.dequantize(), by_row[QUERY].dequantize())


def test_a_scale_that_fp16_cannot_hold_is_refused_by_name(
    packed: ModuleType, model: Path, tmp_path: Path
) -> None:
    weights: Weights = packed.rounded_weights(model, symmetric=True)
    scale = weights[QUERY].scale.float()
    scale[3, 1] = 1 / 3
    weights[QUERY] = replace(weights[QUERY], scale=scale)
    path = packed.write_packed(tmp_path / "source", model, weights, "compressed-tensors")
    for form in ("gptq", "gptq_v2", "awq"):
        with pytest.raises(Refused, match=rf"scale of {QUERY}.*float32.*not exact in torch.float16"):
            convert(path, form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_format_has_no_place_for_is_refused(packed: ModuleType, model: Path, tmp_path: Path) -> None:
    asymmetric = packed.rounded_weights(model, symmetric=False)
    path = packed.write_packed(tmp_path / "asymmetric", model, asymmetric, "compressed-tensors")
    with pytest.raises(Refused, match=r"gptq cannot hold model\.layers.*Use gptq_v2"):
        convert(path, "gptq", tmp_path / "out")
    eight = packed.rounded_weights(model, symmetric=True, num_bits=8)
    path = packed.write_packed(tmp_path / "eight", model, eight, "gptq")
    with pytest.raises(Refused, match=r"awq cannot hold model\.layers.*4-bit weights only"):
        convert(path, "awq", tmp_path / "out")
    with pytest.raises(Refused, match="no integer weights"):
        convert(model, "awq", tmp_path / "out")
    with pytest.raises(Refused, match="own directory, or holds it"):
        convert(path, "gptq_v2", path)
    packed.change_settings(path, lambda settings: settings.update(desc_act=True))
    packed.change_tensors(path, lambda t: t[f"{QUERY}.g_idx"].copy_(t[f"{QUERY}.g_idx"].flip(0)))
    with pytest.raises(Refused, match=f"{QUERY} has groups of columns that are not neighbours"):
        convert(path, "compressed-tensors", tmp_path / "out")


def test_cache_scales_are_not_dropped(packed: ModuleType, model: Path, tmp_path: Path) -> None:
    weights = packed.rounded_weights(model, symmetric=True)
    path = packed.write_packed(tmp_path / "source", model, weights, "compressed-tensors")
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    packed.change_settings(path, lambda settings: settings.update(kv_cache_scheme=scheme))
    with pytest.raises(Refused, match="fp8 KV cache, for which format awq has no place"):
        convert(path, "awq", tmp_path / "out")


def test_a_result_with_other_weights_is_not_published(
    packed: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed.write_packed(
        tmp_path / "source", model, packed.rounded_weights(model, symmetric=True), "gptq"
    )
    fitted = conversion._fitted

    def wrong(weight: QuantizedWeight, plan: conversion.ConvertPlan) -> QuantizedWeight:
        return replace(fitted(weight, plan), values=weight.values.roll(1, 1))

    monkeypatch.setattr(conversion, "_fitted", wrong)
    with pytest.raises(WorkFailed, match="not those that were computed; nothing was published"):
        convert(path, "awq", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
