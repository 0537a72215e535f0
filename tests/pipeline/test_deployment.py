"""`quantize --for`: what is planned for a target comes back exactly from its export; the rest is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bitsmith.compile.tensorrt_checkpoint import open_checkpoint
from bitsmith.compile.tensorrt_job import TensorrtJob, plan_tensorrt
from bitsmith.compile.tensorrt_names import kv_scale_name
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.compile.tensorrt_release import DEFAULT_RELEASE
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.core.model_ref import ModelSource
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme, parse_scheme_name
from bitsmith.pipeline.main import main
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.deployment import Deployment
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight_source import open_weights

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Sizes that TensorRT-LLM's group-wise kernels take on two ranks; the tokenizer of the small one."""
    path = tmp_path_factory.mktemp("sized")
    config = LlamaConfig(
        vocab_size=260, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, bos_token_id=256,
        eos_token_id=257,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = LlamaForCausalLM(config)
        made.to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tiny_model / name).read_bytes())
    return path


def job(model: Path, out: Path, name: str, deployment: Deployment | None, **settings: Any) -> QuantizeJob:
    scheme = QuantizationScheme(name, *parse_scheme_name(name), **settings)
    calibration = CalibrationSettings(num_samples=4, seq_len=32)
    return QuantizeJob(ModelSource("tiny", model), scheme, calibration, out, deployment=deployment)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["w4a16-gptq", "w4a16-rtn", "w8a8-fp8", "w8a8-fp8-dynamic"])
def test_planned_checkpoint_comes_back_exactly(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    asked = job(model, tmp_path / "q", name, Deployment("tensorrt-llm", ranks), kv_cache="none")
    manifest = quantize_model(asked, plan_quantize(asked), QUIET)
    assert manifest.config["deployment"] == {"target": "tensorrt-llm", "tensor_parallel": ranks}
    engine = TensorrtJob(tmp_path / "q", tmp_path / "e", "tensorrt-llm", tp_size=ranks, is_strict=True)
    made = compile_tensorrt(engine, plan_tensorrt(engine), QUIET)  # strict: nothing is rounded again
    assert made.details["rounded_again"] == {}
    back = dict(open_checkpoint(tmp_path / "e" / "checkpoint", DEFAULT_RELEASE).dequantized())
    source = open_weights(tmp_path / "q")
    names = [name for name in source.names if name.endswith("_proj.weight")]
    assert len(names) == 14
    for tensor_name in names:
        assert torch.equal(back[tensor_name].float(), source.dequantized(tensor_name).float()), tensor_name


def test_fused_fp8_modules_share_one_weight_scale(model: Path, tmp_path: Path) -> None:
    asked = job(model, tmp_path / "q", "w8a8-fp8", Deployment("tensorrt-llm"))
    quantize_model(asked, plan_quantize(asked), QUIET)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for group in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        scales = [tensors[f"model.layers.1.{group[0]}.{part}_proj.weight_scale"] for part in group[1]]
        assert all(torch.equal(scale, scales[0]) for scale in scales)


@pytest.mark.parametrize(
    ("target", "ranks", "name", "settings", "reason"),
    [
        ("tensorrt-llm", 1, "w4a16-gptq", {"symmetric": False}, "come back exactly"),
        ("tensorrt-llm-pytorch", 1, "w4a16-gptq", {"symmetric": False}, "without zero points"),
        ("tensorrt-llm", 1, "w8a16-gptq", {}, "rounds 8-bit weights again"),
        ("tensorrt-llm", 1, "w3a16-gptq", {}, "4-bit and 8-bit integers, not for 3 bits"),
        ("tensorrt-llm-pytorch", 1, "w2a16-rtn", {}, "4-bit and 8-bit integers, not for 2 bits"),
        ("vllm", 1, "w3a16-awq", {}, "4-bit and 8-bit integers, not for 3 bits"),
        ("tensorrt-llm-pytorch", 1, "w8a16-gptq", {"group_size": 64}, "--group-size channel"),
        ("tensorrt-llm", 1, "w4a16-gptq", {"group_size": 32}, "groups of 128 or 64"),
        ("tensorrt-llm", 1, "w4a16-gptq", {"group_size": "channel"}, "groups of 128 or 64"),
        ("tensorrt-llm-pytorch", 4, "w4a16-gptq", {"group_size": 128}, "on each of 4 ranks"),
        ("vllm", 4, "w4a16-gptq", {"group_size": 128}, "on each of 4 ranks"),
        ("tensorrt-llm", 3, "w8a8-fp8", {}, "does not divide 4 attention heads"),
        ("vllm", 8, "w4a16-gptq", {}, "does not divide 4 attention heads"),
        ("vllm", 1, "w4a16-gptq", {"kv_cache": "int8"}, "--kv-cache int8: this target reads FP8 scales only"),
        ("tensorrt-llm-pytorch", 1, "none", {"kv_cache": "int8"}, "--kv-cache int8: this target reads FP8"),
    ],
)
def test_what_the_target_cannot_take_is_refused(
    model: Path, tmp_path: Path, target: Any, ranks: int, name: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        plan_quantize(job(model, tmp_path / "q", name, Deployment(target, ranks), **settings))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("asked_of_export", "end"), [("auto", 127), ("fp8", 448)])
def test_an_int8_kv_cache_is_exported_with_its_scales(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_of_export: Any, end: int
) -> None:
    """One dequantization scale for a layer's keys and values: the larger of both."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    asked = job(model, tmp_path / "q", "w4a16-rtn", Deployment("tensorrt-llm"), kv_cache="int8")
    quantize_model(asked, plan_quantize(asked), QUIET)
    engine = TensorrtJob(tmp_path / "q", tmp_path / "e", "tensorrt-llm", kv_cache=asked_of_export)
    compile_tensorrt(engine, plan_tensorrt(engine), QUIET)
    checkpoint = open_checkpoint(tmp_path / "e" / "checkpoint", DEFAULT_RELEASE)
    assert checkpoint.model.quant.kv_cache_quant_algo == {127: "INT8", 448: "FP8"}[end]
    source = open_weights(tmp_path / "q")
    for layer in range(2):
        pair = source.kv_scales(layer)
        assert pair is not None
        exported = float(checkpoint.ranks[0].tensor(kv_scale_name(layer)))
        assert exported * end == pytest.approx(max(pair) * 127, rel=1e-6)


def test_automatic_group_size_fits_every_rank(model: Path, tmp_path: Path) -> None:
    sizes = {}
    for ranks in (1, 2, 4):
        asked = job(model, tmp_path / "q", "w4a16-rtn", Deployment("tensorrt-llm-pytorch", ranks))
        sizes[ranks] = plan_quantize(asked).scheme.group_size
    assert sizes == {1: 128, 2: 128, 4: 64}
    eight_bits = job(model, tmp_path / "q", "w8a16-rtn", Deployment("tensorrt-llm-pytorch"))
    assert plan_quantize(eight_bits).scheme.group_size == "channel"


def test_another_target_is_another_checkpoint(model: Path, tmp_path: Path) -> None:
    plain = job(model, tmp_path / "q", "w4a16-rtn", None)
    planned = replace(plain, deployment=Deployment("vllm", 2))
    assert plan_quantize(plain).stage_key != plan_quantize(planned).stage_key
    assert "deployment" not in plan_quantize(plain).config


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "q")
    start = [
        "quantize",
        str(model),
        "--scheme",
        "w8a8-fp8-dynamic",
        "--out",
        out,
        "--json",
    ]
    assert main([*start, "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel belongs to --for" in capsys.readouterr().err
    assert main([*start, "--for", "cpu", "--tensor-parallel", "2"]) == 2
    assert main([*start, "--for", "tensorrt-llm", "--tensor-parallel", "2", "--dry-run"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["config"]["deployment"] == {"target": "tensorrt-llm", "tensor_parallel": 2}
    assert main([*start, "--for", "tensorrt-llm"]) == 0
    assert read_manifest(tmp_path / "q").config["deployment"]["target"] == "tensorrt-llm"


def test_negative_scales_of_an_unplanned_checkpoint_are_refused(model: Path, tmp_path: Path) -> None:
    unplanned = job(model, tmp_path / "q", "w4a16-gptq", None, kv_cache="none", group_size=64)
    quantize_model(unplanned, plan_quantize(unplanned), QUIET)
    weights = open_weights(tmp_path / "q")
    assert (weights.linear("model.layers.0.mlp.down_proj").scale < 0).any()  # type: ignore[union-attr]
    with pytest.raises(Refused, match=r"negative scales.*--for tensorrt-llm"):
        plan_tensorrt(TensorrtJob(tmp_path / "q", tmp_path / "e", "tensorrt-llm"))
