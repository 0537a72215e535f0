"""The unified exporter: byte-equal to ModelOpt's files of the same weights, and accepted by the validator."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_checkpoint import open_checkpoint
from bitsmith.compile.tensorrt_export import CheckpointExport
from bitsmith.compile.tensorrt_plan import ExportSettings, plan_export
from bitsmith.compile.tensorrt_release import parse_release
from bitsmith.compile.tensorrt_source import open_source
from bitsmith.compile.tensorrt_unified_check import check_unified_checkpoint
from bitsmith.compile.tensorrt_unified_export import UnifiedExport
from bitsmith.compile.tensorrt_unified_plan import UnifiedPlan, UnifiedSettings, plan_unified
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.quantize.compressed_tensors import pack_weight, quantization_config, weight_args
from bitsmith.quantize.weight import QuantizedWeight

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
RELEASE = parse_release("1.2.1")
NAMES = [
    "llama_bf16",
    "llama_kvfp8_only",
    "llama_fp8_kvfp8",
    "llama_fp8pcpt",
    "llama_int8wo",
    "llama_int4awq_kvfp8",
    "llama_w4a8awq",
    "qwen3_fp8_kvfp8",
    "gemma2_fp8_kvfp8",
]


def export(
    source: Path, target: Path, chosen: UnifiedSettings | None = None
) -> tuple[UnifiedPlan, UnifiedExport]:
    opened = open_source(source)
    plan = plan_unified(opened, chosen or UnifiedSettings())
    exported = UnifiedExport(opened, plan)
    target.mkdir(exist_ok=True)
    exported.write(target, Reporter(quiet=True))
    return plan, exported


@pytest.mark.parametrize("name", NAMES)
def test_export_of_unified_golden_is_the_same_file(name: str, tmp_path: Path) -> None:
    golden = GOLDEN / f"mo_hf_{name}"
    _, exported = export(golden, tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(golden / "model.safetensors")
    assert set(ours) == set(theirs)
    for key, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[key].dtype, theirs[key].shape), key
        left, right = tensor.reshape(-1).view(torch.uint8), theirs[key].reshape(-1).view(torch.uint8)
        assert torch.equal(left, right), key
    assert exported.errors == {}
    report = check_unified_checkpoint(tmp_path, RELEASE, golden)
    assert report.is_accepted, report.lines()


@pytest.mark.parametrize("name", NAMES[1:])
def test_quantization_sections_say_what_modelopts_say(name: str, tmp_path: Path) -> None:
    golden = GOLDEN / f"mo_hf_{name}"
    export(golden, tmp_path)
    ours = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    theirs = json.loads((golden / "hf_quant_config.json").read_text())["quantization"]
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size", "pre_quant_scale"):
        assert ours.get(key) == theirs.get(key), key
    assert set(theirs.get("exclude_modules", [])) <= set(ours["exclude_modules"])


def packed_checkpoint(
    path: Path, num_bits: int, group_size: int, symmetric: bool
) -> dict[str, QuantizedWeight]:
    """The dense golden as a compressed-tensors checkpoint of random integers."""
    path.mkdir()
    dense = load_file(GOLDEN / "mo_hf_llama_bf16" / "model.safetensors")
    config = json.loads((GOLDEN / "mo_hf_llama_bf16" / "config.json").read_text())
    args = weight_args(num_bits, group_size, symmetric, act_order=False)
    config["quantization_config"] = quantization_config(args, ["lm_head"], "fp8")
    generator = torch.Generator().manual_seed(0)
    tensors, weights = {}, {}
    for name, tensor in dense.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        low, high = -(1 << (num_bits - 1)), 1 << (num_bits - 1)
        values = torch.randint(low, high, tensor.shape, generator=generator).to(torch.int8)
        shape = (tensor.shape[0], tensor.shape[1] // group_size)
        scale = (torch.rand(shape, generator=generator) * 0.01 + 0.01).bfloat16()
        zero_point = None if symmetric else torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
        weights[module] = QuantizedWeight(values, scale, zero_point, num_bits, group_size)
        tensors |= pack_weight(module, weights[module])
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.02)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.01)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return weights


def test_packed_checkpoint_becomes_awq_with_ones(tmp_path: Path) -> None:
    weights = packed_checkpoint(tmp_path / "packed", 4, 64, symmetric=True)
    plan, _ = export(tmp_path / "packed", tmp_path / "unified")
    assert (plan.quant_algo, plan.group_size, plan.kv_algo) == ("W4A16_AWQ", 64, "FP8")
    assert [fallback.where for fallback in plan.fallbacks] == ["kv_cache"]
    report = check_unified_checkpoint(tmp_path / "unified", RELEASE, tmp_path / "packed")
    assert report.is_accepted, report.lines()
    back = open_source(tmp_path / "unified")
    for module, weight in weights.items():
        assert torch.equal(back.linear(module).dequantize(), weight.dequantize()), module
    tensors = load_file(tmp_path / "unified" / "model.safetensors")
    assert bool((tensors["model.layers.0.mlp.down_proj.pre_quant_scale"] == 1).all())
    assert "model.layers.0.mlp.up_proj.pre_quant_scale" not in tensors


def test_grouped_eight_bit_weights_are_rounded_to_channels_and_listed(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path / "packed", 8, 64, symmetric=True)
    plan, exported = export(tmp_path / "packed", tmp_path / "unified")
    assert {fallback.where for fallback in plan.fallbacks} == {"kv_cache", "weights"}
    assert len(exported.errors) == 14
    assert max(exported.errors.values()) < 0.01
    assert check_unified_checkpoint(tmp_path / "unified", RELEASE).is_accepted


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [64, 128])
def test_packed_checkpoint_becomes_an_engine_checkpoint(
    symmetric: bool, group_size: int, tmp_path: Path
) -> None:
    """GPTQ's integers, carried in AWQ's layout, which TensorRT-LLM lays out for the GPU at build."""
    weights = packed_checkpoint(tmp_path / "packed", 4, group_size, symmetric)
    source = open_source(tmp_path / "packed")
    plan = plan_export(source, ExportSettings())
    assert plan.model.quant.quant_algo == "W4A16_AWQ"
    assert (plan.model.quant.has_zero_point, plan.model.quant.pre_quant_scale) == (not symmetric, False)
    assert plan.model.quant.group_size == group_size
    path = tmp_path / "checkpoint"
    path.mkdir()
    exported = CheckpointExport(source, plan)
    exported.write(path, Reporter(quiet=True))
    report = check_engine_checkpoint(path, RELEASE, tmp_path / "packed")
    assert report.is_accepted, report.lines()
    checkpoint = open_checkpoint(path, RELEASE)
    assert exported.errors == {}
    for name, real in checkpoint.dequantized():
        module = name.removesuffix(".weight")
        if module in weights:
            want = weights[module].dequantize()
            # `zero` holds zero_point * scale in the model's dtype: 8 bits of a product of 4 and 8 bits.
            tolerance = 0 if symmetric else float(want.abs().max()) * 2**-8
            assert bool(((real - want).abs() <= tolerance).all()), module


def test_eight_bit_weights_are_plain_in_an_engine_checkpoint(tmp_path: Path) -> None:
    weights = packed_checkpoint(tmp_path / "packed", 8, 64, symmetric=True)
    source = open_source(tmp_path / "packed")
    plan = plan_export(source, ExportSettings(kv_cache="bf16"))
    assert plan.model.quant.to_json() == {
        "quant_algo": "W8A16",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["*lm_head", "*vocab_embedding"],
    }
    path = tmp_path / "checkpoint"
    path.mkdir()
    CheckpointExport(source, plan).write(path, Reporter(quiet=True))
    assert check_engine_checkpoint(path, RELEASE, tmp_path / "packed").is_accepted
    for name, real in open_checkpoint(path, RELEASE).dequantized():
        if name.removesuffix(".weight") in weights:
            assert torch.equal(real, weights[name.removesuffix(".weight")].dequantize().bfloat16().float())


def test_channel_scales_of_four_bits_are_refused(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path / "packed", 4, 64, symmetric=True)
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    file.write_text(json.dumps(config))
    with pytest.raises(Refused, match="need groups of 64 or 128"):
        open_source(tmp_path / "packed")


def test_zero_points_are_refused(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path / "packed", 4, 64, symmetric=False)
    with pytest.raises(Refused, match="called without zeros"):
        plan_unified(open_source(tmp_path / "packed"), UnifiedSettings())


REFUSALS: list[tuple[str, UnifiedSettings, str]] = [
    ("mo_hf_llama_int8sq", UnifiedSettings(), "no linear method for"),
    ("mo_hf_llama_bf16", UnifiedSettings(kv_cache="int8"), "not established"),
    ("mo_hf_llama_bf16", UnifiedSettings(tp_size=3), "choose a divisor of both"),
    ("mo_hf_llama_fp8_kvfp8", UnifiedSettings(is_strict=True), "ignores FP8 KV scales"),
]


@pytest.mark.parametrize(("golden", "chosen", "reason"), REFUSALS)
def test_refused_before_work(golden: str, chosen: UnifiedSettings, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        plan_unified(open_source(GOLDEN / golden), chosen)


def test_partly_quantized_fused_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "faulty"
    shutil.copytree(GOLDEN / "mo_hf_llama_fp8_kvfp8", path)
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    del tensors["model.layers.0.self_attn.k_proj.weight_scale"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(Refused, match="k_proj is not quantized"):
        plan_unified(open_source(path), UnifiedSettings())
