"""Faults planted one at a time into right checkpoints: each must be found, by its own code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_finding import Severity
from bitsmith.compile.tensorrt_release import parse_release
from bitsmith.compile.tensorrt_unified_check import check_unified_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
SOURCE = GOLDEN / "mo_hf_llama_bf16"
P, Q = "transformer.layers.0.", "model.layers.0."
FP8, TP2, AWQ = "mo_trt_llama_fp8_kvfp8", "mo_trt_llama_fp8_tp2", "mo_trt_llama_int4awq_kvfp8"
BF16, SQ, ROWWISE = "mo_trt_llama_bf16", "mo_trt_llama_int8sq", "mo_trt_llama_fp8pcpt"
Tensors = dict[str, Tensor]
Ranks = list[Tensors]
Plant = Callable[[dict[str, Any], Ranks], None]


def scaled(name: str, change: Callable[[Tensor], Tensor], rank: int = 0) -> Plant:
    """A fault that replaces one tensor."""

    def plant(config: dict[str, Any], ranks: Ranks) -> None:
        ranks[rank][name] = change(ranks[rank][name])

    return plant


def removed(name: str) -> Plant:
    def plant(config: dict[str, Any], ranks: Ranks) -> None:
        del ranks[0][name]

    return plant


def configured(path: str, value: Any) -> Plant:
    """A fault that sets `a.b` in config.json; value None removes it."""

    def plant(config: dict[str, Any], ranks: Ranks) -> None:
        *parents, leaf = path.split(".")
        for parent in parents:
            config = config[parent]
        if value is None:
            config.pop(leaf)
        else:
            config[leaf] = value

    return plant


def swap_fc_and_gate(config: dict[str, Any], ranks: Ranks) -> None:
    for suffix in ("weight", "weights_scaling_factor"):
        fc, gate = f"{P}mlp.fc.{suffix}", f"{P}mlp.gate.{suffix}"
        ranks[0][fc], ranks[0][gate] = ranks[0][gate], ranks[0][fc]


def exchange_nibbles(weight: Tensor) -> Tensor:
    stored = weight.view(torch.uint8)
    return ((stored >> 4) | (stored << 4)).view(torch.int8)


def unpack(weight: Tensor) -> Tensor:
    stored = weight.view(torch.uint8)
    return torch.cat([stored & 15, stored >> 4]).view(torch.int8)


def not_a_number(weight: Tensor) -> Tensor:
    broken = weight.clone().view(torch.uint8)
    broken[0, 0] = 0x7F
    return broken.view(torch.float8_e4m3fn)


def put_nan(weight: Tensor) -> Tensor:
    return weight.index_fill(0, torch.tensor([3]), float("nan"))


def interleave_heads(weight: Tensor) -> Tensor:
    """Rows q0 k0 v0 q1 ... instead of all of q, then k, then v."""
    order = torch.arange(256).reshape(8, 32)[[0, 1, 4, 6, 2, 3, 5, 7]].flatten()
    return weight.view(torch.uint8)[order].view(weight.dtype)


def unsplit_qkv(config: dict[str, Any], ranks: Ranks) -> None:
    name = f"{P}attention.qkv.weight"
    whole = torch.cat([rank[name].view(torch.uint8) for rank in ranks]).view(torch.float8_e4m3fn)
    for rank in ranks:
        rank[name] = whole.clone()


def copy_rank(config: dict[str, Any], ranks: Ranks) -> None:
    ranks[1] = dict(ranks[0])


def shorten_vocabulary(config: dict[str, Any], ranks: Ranks) -> None:
    config["vocab_size"] = 255  # the last row of the second shard is padding now, and is not zero


def use_weight_only(config: dict[str, Any], ranks: Ranks) -> None:
    config["quantization"] = {"quant_algo": "W8A16", "exclude_modules": ["lm_head"]}


def add_wrong_reciprocal(config: dict[str, Any], ranks: Ranks) -> None:
    ranks[0][f"{P}attention.kv_cache_rcp_scaling_factor"] = torch.tensor([2.0])


def waste_the_grid(config: dict[str, Any], ranks: Ranks) -> None:
    name = f"{P}mlp.proj."
    ranks[0][f"{name}weights_scaling_factor"] *= 16
    ranks[0][f"{name}weight"] = (ranks[0][f"{name}weight"].float() / 16).to(torch.float8_e4m3fn)


def make_groups_of_64(config: dict[str, Any], ranks: Ranks) -> None:
    config["quantization"]["quant_algo"], config["quantization"]["group_size"] = "W4A8_AWQ", 64


def add_shared_scale_beside_weight_only(config: dict[str, Any], ranks: Ranks) -> None:
    config["quantization"] = {"quant_algo": "W8A16"}
    ranks[0][f"{P}attention.qkv.weights_scaling_factor"] = torch.ones(256)


def multiply_norm(config: dict[str, Any], ranks: Ranks) -> None:
    ranks[0][f"{P}input_layernorm.weight"] *= 2


ENGINE_FAULTS: list[tuple[str, str, Plant, str]] = [
    (
        "reciprocal weight scale",
        FP8,
        scaled(f"{P}mlp.proj.weights_scaling_factor", lambda s: 1 / s),
        "scale-range",
    ),
    (
        "reciprocal activation scale",
        FP8,
        scaled(f"{P}mlp.proj.activation_scaling_factor", lambda s: 1 / s),
        "scale-range",
    ),
    ("reciprocal row scale", ROWWISE, scaled(f"{P}mlp.fc.per_channel_scale", lambda s: 1 / s), "scale-range"),
    (
        "reciprocal group scale",
        AWQ,
        scaled(f"{P}mlp.fc.weights_scaling_factor", lambda s: 1 / s),
        "scale-range",
    ),
    ("negative scale", FP8, scaled(f"{P}mlp.fc.weights_scaling_factor", lambda s: -s), "scale-negative"),
    ("scale of zero", SQ, scaled(f"{P}mlp.fc.weights_scaling_factor", lambda s: s * 0), "scale-zero"),
    (
        "scale in bf16",
        FP8,
        scaled(f"{P}mlp.fc.weights_scaling_factor", lambda s: s.bfloat16()),
        "tensor-dtype",
    ),
    ("scalar scale", FP8, scaled(f"{P}mlp.fc.weights_scaling_factor", lambda s: s[0]), "tensor-shape"),
    ("unused grid", FP8, waste_the_grid, "grid-unused"),
    (
        "KV scale of zero",
        FP8,
        scaled(f"{P}attention.kv_cache_scaling_factor", lambda s: s * 0),
        "kv-scale-zero",
    ),
    (
        "reciprocal KV scale",
        FP8,
        scaled(f"{P}attention.kv_cache_scaling_factor", lambda s: s * 457),
        "kv-scale-range",
    ),
    ("KV scale missing", FP8, removed(f"{P}attention.kv_cache_scaling_factor"), "tensor-missing"),
    (
        "K and V beyond KV",
        FP8,
        scaled(f"{P}attention.k_cache_scaling_factor", lambda s: s * 2),
        "kv-scale-merge",
    ),
    ("wrong KV reciprocal", FP8, add_wrong_reciprocal, "kv-scale-reciprocal"),
    ("swapped fc and gate", FP8, swap_fc_and_gate, "source-weight"),
    ("interleaved heads", FP8, scaled(f"{P}attention.qkv.weight", interleave_heads), "source-weight"),
    ("unsplit QKV", TP2, unsplit_qkv, "tensor-shape"),
    ("transposed weight", FP8, scaled(f"{P}mlp.proj.weight", lambda w: w.T.contiguous()), "tensor-shape"),
    (
        "square weight transposed",
        BF16,
        scaled(f"{P}attention.dense.weight", lambda w: w.T.contiguous()),
        "source-weight",
    ),
    ("missing pre-quant scale", AWQ, removed(f"{P}mlp.proj.prequant_scaling_factor"), "tensor-missing"),
    (
        "reciprocal pre-quant scale",
        SQ,
        scaled(f"{P}mlp.proj.prequant_scaling_factor", lambda s: 1 / s),
        "source-weight",
    ),
    (
        "zero pre-quant scale",
        AWQ,
        scaled(f"{P}mlp.fc.prequant_scaling_factor", lambda s: s * 0),
        "pre-quant-range",
    ),
    ("nibbles exchanged", AWQ, scaled(f"{P}mlp.fc.weight", exchange_nibbles), "source-weight"),
    ("nibbles not packed", AWQ, scaled(f"{P}mlp.fc.weight", unpack), "tensor-shape"),
    ("wrong group size", AWQ, configured("quantization.group_size", 64), "tensor-shape"),
    ("group size not written", AWQ, configured("quantization.group_size", None), "group-size"),
    ("zero points promised", AWQ, configured("quantization.has_zero_point", True), "tensor-missing"),
    ("W4A8 in groups of 64", AWQ, make_groups_of_64, "group-size"),
    ("exclude pattern dropped", FP8, configured("quantization.exclude_modules", []), "exclude-head"),
    ("embedding not excluded", BF16, use_weight_only, "exclude-embedding"),
    ("scale beside weight-only", BF16, add_shared_scale_beside_weight_only, "weight-only-scale"),
    ("unknown quantization key", FP8, configured("quantization.awq_block_size", 128), "quant-key"),
    ("unknown algorithm", FP8, configured("quantization.quant_algo", "INT4_AWQ"), "quant-algo"),
    ("unknown KV type", FP8, configured("quantization.kv_cache_quant_algo", "FP4"), "kv-algo"),
    ("smooth-quant scale missing", SQ, removed(f"{P}mlp.fc.activation_scaling_factor"), "tensor-missing"),
    ("NaN in a norm", FP8, scaled(f"{P}input_layernorm.weight", put_nan), "not-finite"),
    ("NaN among FP8 weights", FP8, scaled(f"{P}mlp.fc.weight", not_a_number), "not-finite"),
    ("weight of zeros", BF16, scaled(f"{P}mlp.fc.weight", torch.zeros_like), "all-zero"),
    ("norm of zeros", BF16, scaled(f"{P}post_layernorm.weight", torch.zeros_like), "norm-zero"),
    ("norm of another model", BF16, multiply_norm, "source-norm"),
    ("head missing", BF16, removed("lm_head.weight"), "tensor-missing"),
    ("head of another model", BF16, scaled("lm_head.weight", lambda w: w.flip(0)), "source-table"),
    ("second rank is a copy", TP2, copy_rank, "shards-identical"),
    (
        "norms differ by rank",
        TP2,
        scaled(f"{P}input_layernorm.weight", lambda w: w * 2, 1),
        "replica-differs",
    ),
    (
        "scales differ by rank",
        TP2,
        scaled(f"{P}mlp.fc.weights_scaling_factor", lambda w: w / 2, 1),
        "replica-differs",
    ),
    ("padding not zero", TP2, shorten_vocabulary, "head-padding"),
    ("world size wrong", TP2, configured("mapping.world_size", 4), "mapping"),
    ("architecture missing", FP8, configured("architecture", None), "config-missing"),
    ("architecture unknown", FP8, configured("architecture", "BertModel"), "architecture"),
    ("rotary kind missing", FP8, configured("position_embedding_type", None), "position-embedding"),
    ("rotary base wrong", FP8, configured("rotary_base", 500000.0), "source-config"),
    ("epsilon wrong", FP8, configured("norm_epsilon", 1e-5), "source-config"),
    ("KV heads wrong", FP8, configured("num_key_value_heads", 3), "sizes"),
]


def copy_with_fault(golden: str, plant: Plant, path: Path) -> Path:
    shutil.copytree(GOLDEN / golden, path)
    config = json.loads((path / "config.json").read_text())
    files = sorted(path.glob("*.safetensors"))
    ranks = [load_file(file) for file in files]
    plant(config, ranks)
    (path / "config.json").write_text(json.dumps(config))
    for file, tensors in zip(files, ranks, strict=True):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    return path


@pytest.mark.parametrize(
    ("golden", "plant", "code"), [f[1:] for f in ENGINE_FAULTS], ids=[f[0] for f in ENGINE_FAULTS]
)
def test_engine_fault_is_found(golden: str, plant: Plant, code: str, tmp_path: Path) -> None:
    release = parse_release("1.2.1")
    assert code not in check_engine_checkpoint(GOLDEN / golden, release, SOURCE).codes()
    report = check_engine_checkpoint(copy_with_fault(golden, plant, tmp_path / "faulty"), release, SOURCE)
    assert code in report.codes(), report.lines()
    assert report.is_accepted == all(
        finding.severity is Severity.WARN for finding in report.findings if finding.code == code
    )


def test_a_few_large_scales_are_no_reciprocal(tmp_path: Path) -> None:
    """Scales that AWQ folds into weights can make single groups of them very large."""

    def enlarge_one(scale: Tensor) -> Tensor:
        scale.view(-1)[0] = 9.0
        return scale

    plant = scaled(f"{P}mlp.fc.weights_scaling_factor", enlarge_one)
    report = check_engine_checkpoint(copy_with_fault(AWQ, plant, tmp_path / "folded"), parse_release("1.2.1"))
    assert report.is_accepted and "scale-large" in report.codes()


@pytest.mark.parametrize("damage", ["missing", "truncated", "not safetensors"])
def test_damaged_rank_file_is_found(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "faulty"
    shutil.copytree(GOLDEN / TP2, path)
    file = path / "rank1.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100] if damage == "truncated" else b"\x80\x04pickle")
    report = check_engine_checkpoint(path, parse_release("1.2.1"))
    assert {finding.code for finding in report.refusals} == {"rank-file"}


def test_hints_name_the_mistake(tmp_path: Path) -> None:
    release = parse_release("1.2.1")
    swapped = copy_with_fault(FP8, swap_fc_and_gate, tmp_path / "swapped")
    texts = " ".join(map(str, check_engine_checkpoint(swapped, release, SOURCE).refusals))
    assert "It holds up_proj: exchange them" in texts
    nibbles = copy_with_fault(AWQ, scaled(f"{P}mlp.fc.weight", exchange_nibbles), tmp_path / "nibbles")
    texts = " ".join(map(str, check_engine_checkpoint(nibbles, release, SOURCE).refusals))
    assert "Its nibbles are exchanged" in texts
    unsplit = copy_with_fault(TP2, unsplit_qkv, tmp_path / "unsplit")
    texts = " ".join(map(str, check_engine_checkpoint(unsplit, release, SOURCE).refusals))
    assert "it looks unsplit" in texts


HF_AWQ, HF_W4A8, HF_FP8 = "mo_hf_llama_int4awq_kvfp8", "mo_hf_llama_w4a8awq", "mo_hf_llama_fp8_kvfp8"
HF_NVFP4 = "mo_hf_llama_nvfp4_kvnvfp4"


def sectioned(key: str, value: Any) -> Callable[[dict[str, Any], Tensors], None]:
    """A fault in hf_quant_config.json's quantization section; value None removes the key."""

    def plant(section: dict[str, Any], tensors: Tensors) -> None:
        if value is None:
            section.pop(key)
        else:
            section[key] = value

    return plant


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], Tensors], None]:
    def plant(section: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return plant


def dropped(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def plant(section: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return plant


def swap_gate_and_up(section: dict[str, Any], tensors: Tensors) -> None:
    for suffix in ("weight", "weight_scale", "input_scale"):
        gate, up = f"{Q}mlp.gate_proj.{suffix}", f"{Q}mlp.up_proj.{suffix}"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


UNIFIED_FAULTS: list[tuple[str, str, Callable[[dict[str, Any], Tensors], None], str]] = [
    ("pre-quant scale missing", HF_AWQ, dropped(f"{Q}mlp.down_proj.pre_quant_scale"), "tensor-missing"),
    (
        "nibbles not packed",
        HF_AWQ,
        replaced(f"{Q}mlp.up_proj.weight", lambda w: torch.cat([w, w])),
        "tensor-shape",
    ),
    ("group size missing", HF_AWQ, sectioned("group_size", None), "group-size"),
    ("zero points", HF_AWQ, sectioned("has_zero_point", True), "zero-point"),
    ("head not excluded", HF_FP8, sectioned("exclude_modules", ["model.embed_tokens"]), "exclude-head"),
    ("GPTQ", HF_AWQ, sectioned("quant_algo", "W4A16_GPTQ"), "quant-algo"),
    ("INT8 KV", HF_FP8, sectioned("kv_cache_quant_algo", "INT8"), "kv-algo"),
    (
        "fused inputs differ",
        HF_W4A8,
        replaced(f"{Q}mlp.up_proj.input_scale", lambda s: s * 2),
        "shared-scale",
    ),
    ("reciprocal scale", HF_FP8, replaced(f"{Q}mlp.up_proj.weight_scale", lambda s: 1 / s), "scale-range"),
    ("reciprocal KV scale", HF_FP8, replaced(f"{Q}self_attn.k_proj.k_scale", lambda s: 1 / s), "scale-range"),
    ("input scale of zero", HF_FP8, replaced(f"{Q}mlp.up_proj.input_scale", lambda s: s * 0), "scale-zero"),
    ("no input scale", HF_FP8, dropped(f"{Q}mlp.up_proj.input_scale"), "dynamic-inputs"),
    ("second scale missing", HF_NVFP4, dropped(f"{Q}mlp.up_proj.weight_scale_2"), "tensor-missing"),
    (
        "block scales in fp32",
        HF_NVFP4,
        replaced(f"{Q}mlp.up_proj.weight_scale", lambda s: s.float()),
        "tensor-dtype",
    ),
    ("KV scale missing", HF_NVFP4, dropped(f"{Q}self_attn.k_proj.k_scale"), "tensor-missing"),
    ("swapped gate and up", HF_FP8, swap_gate_and_up, "source-weight"),
    ("inline disagrees", HF_FP8, sectioned("quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"), "inline-differs"),
]


@pytest.mark.parametrize(
    ("golden", "plant", "code"), [f[1:] for f in UNIFIED_FAULTS], ids=[f[0] for f in UNIFIED_FAULTS]
)
def test_unified_fault_is_found(
    golden: str, plant: Callable[[dict[str, Any], Tensors], None], code: str, tmp_path: Path
) -> None:
    release = parse_release("1.2.1")
    source = None if golden == HF_NVFP4 else SOURCE
    assert code not in check_unified_checkpoint(GOLDEN / golden, release, source).codes()
    path = tmp_path / "faulty"
    shutil.copytree(GOLDEN / golden, path)
    body = json.loads((path / "hf_quant_config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    plant(body["quantization"], tensors)
    (path / "hf_quant_config.json").write_text(json.dumps(body))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    assert code in check_unified_checkpoint(path, release, source).codes()


def test_gptq_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "faulty"
    shutil.copytree(SOURCE, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    report = check_unified_checkpoint(path, parse_release("1.2.1"))
    assert "method" in report.codes()


def test_there_are_more_than_forty() -> None:
    assert len(ENGINE_FAULTS) + len(UNIFIED_FAULTS) >= 60
