"""FP8 schemes on tiny models: files that other tools load, scales from calibration, resume, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter
from bitsmith.quantize.fp8_weight import FP8_MAX, Fp8Weight
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight_source import open_weights

JobMaker = Callable[..., QuantizeJob]
ModelMaker = Callable[..., Path]
ConfigEditor = Callable[[Path, dict[str, dict[str, Any]]], None]
Saboteur = Callable[[pytest.MonkeyPatch, int, BaseException], list[int]]
FP8_SCHEMES = ("w8a8-fp8", "w8a8-fp8-dynamic")


def run(job: QuantizeJob, reporter: Reporter) -> Manifest:
    return quantize_model(job, plan_quantize(job), reporter)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    result = model(torch.arange(40).view(2, 20) * 5 % 250).logits
    assert isinstance(result, Tensor)
    return result


def rounding_hook(weight: Fp8Weight) -> Any:
    """A forward pre-hook that gives a linear module its input as the checkpoint says it is rounded."""

    def round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        (x,) = args
        if weight.input_scale is None:
            scale = x.abs().amax(dim=-1, keepdim=True) / FP8_MAX
        else:
            scale = torch.tensor(weight.input_scale)
        return ((x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale,)

    return round_input


def simulated(job: QuantizeJob) -> nn.Module:
    """The dense model with our dequantized weights and inputs rounded by our reading of the file."""
    source = open_weights(job.out)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    model.load_state_dict({name: source.dequantized(name) for name in source.names}, strict=False)
    for name, module in model.named_modules():
        weight = source.linear(name) if isinstance(module, nn.Linear) and "layers" in name else None
        if weight is not None:
            assert isinstance(weight, Fp8Weight), name
            module.register_forward_pre_hook(rounding_hook(weight))
    return model


@pytest.mark.parametrize("name", FP8_SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_transformers_computes_what_the_checkpoint_says(
    name: str, architecture: str, make_job: JobMaker, make_model: ModelMaker, reporter: Reporter
) -> None:
    job = make_job(name, model=make_model(architecture), kv_cache="fp8")
    run(job, reporter)
    theirs = logits(AutoModelForCausalLM.from_pretrained(job.out, dtype=torch.float32))
    dense = logits(AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32))
    ours = logits(simulated(job))
    # An input at a rounding boundary may take the other side; otherwise only summation differs.
    assert float((theirs - ours).abs().max()) < 2e-3 * float(ours.abs().max())
    lost = float((theirs - dense).norm() / dense.norm())
    assert 5e-3 < lost < 0.3  # FP8 it is, and not more than that


@pytest.mark.parametrize("name", FP8_SCHEMES)
def test_names_dtypes_and_config_are_those_of_float_quantized(
    name: str, make_job: JobMaker, reporter: Reporter
) -> None:
    is_static = name == "w8a8-fp8"
    job = make_job(name, kv_cache="fp8")
    run(job, reporter)
    tensors = load_file(job.out / "model.safetensors")
    module = "model.layers.1.mlp.gate_proj"
    stored = {key.removeprefix(f"{module}."): tensor for key, tensor in tensors.items() if module in key}
    assert stored["weight"].dtype == torch.float8_e4m3fn and stored["weight"].shape == (96, 64)
    assert stored["weight_scale"].dtype == torch.float32
    assert stored["weight_scale"].shape == ((1,) if is_static else (96, 1))
    assert ("input_scale" in stored) == is_static
    assert tensors["model.layers.1.self_attn.k_scale"].shape == (1,)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    config = QuantizationConfig.model_validate(
        json.loads((job.out / "config.json").read_text())["quantization_config"]
    )
    assert config.format == "float-quantized" and config.kv_cache_scheme is not None
    group = config.config_groups["group_0"]
    assert str(group.weights.strategy) == ("tensor" if is_static else "channel")
    assert str(group.input_activations.strategy) == ("tensor" if is_static else "token")
    assert group.input_activations.dynamic is not is_static


def test_static_scales_are_the_calibration_maxima(make_job: JobMaker, reporter: Reporter) -> None:
    job = make_job("w8a8-fp8")
    plan = plan_quantize(job)
    assert plan.windows is not None
    manifest = quantize_model(job, plan, reporter)
    model = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    seen: list[Tensor] = []
    first = model.model.layers[0].self_attn.q_proj
    first.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(plan.windows.token_ids)
    source = open_weights(job.out)
    q, k, v = (source.linear(f"model.layers.0.self_attn.{part}_proj") for part in "qkv")
    assert isinstance(q, Fp8Weight) and isinstance(k, Fp8Weight) and isinstance(v, Fp8Weight)
    assert q.input_scale is not None
    assert q.input_scale == pytest.approx(float(seen[0].abs().max()) / FP8_MAX, rel=1e-6)
    # What a fused kernel has only one of is shared, and is the largest.
    assert torch.equal(q.scale, k.scale) and torch.equal(q.scale, v.scale)
    stored = [weight.values.float().abs().max() for weight in (q, k, v)]
    assert max(map(float, stored)) == FP8_MAX
    record = manifest.details["modules"][0]
    assert record["method"] == "fp8" and 25 < record["sqnr_db"] < 40


def test_dynamic_needs_no_calibration_and_static_does(make_job: JobMaker) -> None:
    nowhere = {"source": "/nowhere/at/all.txt"}
    assert plan_quantize(make_job("w8a8-fp8-dynamic", calibration=nowhere)).windows is None
    with pytest.raises(Refused, match="nowhere"):
        plan_quantize(make_job("w8a8-fp8", calibration=nowhere))


@pytest.mark.parametrize("name", FP8_SCHEMES)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 32}, "group_size is 32"),
        ({"group_size": "channel"}, "group_size is 'channel'"),
        ({"symmetric": False}, "symmetric is false"),
        ({"act_order": True}, "act_order"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(
    settings: dict[str, Any], said: str, name: str, make_job: JobMaker
) -> None:
    with pytest.raises(Refused, match=said):
        plan_quantize(make_job(name, **settings))


def test_the_estimate_is_the_size_that_is_written(make_job: JobMaker, reporter: Reporter) -> None:
    for name in FP8_SCHEMES:
        job = make_job(name, out=name, kv_cache="fp8")
        plan = plan_quantize(job)
        quantize_model(job, plan, reporter)
        tensors = load_file(job.out / "model.safetensors")
        assert sum(tensor.nbytes for tensor in tensors.values()) == plan.estimate.output_bytes


@pytest.mark.parametrize("name", FP8_SCHEMES)
def test_interrupted_ends_in_the_same_bytes(
    name: str, make_job: JobMaker, fail_at: Saboteur, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make_job(name, out="whole", kv_cache="fp8"), reporter).content_digest
    with monkeypatch.context() as patch:
        fail_at(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(make_job(name, kv_cache="fp8"), reporter)
    assert run(make_job(name, kv_cache="fp8", resume=True), reporter).content_digest == expected


def test_an_input_of_zeros_gets_scale_one_and_is_reported(
    make_job: JobMaker, dead_input_model: Path, reporter: Reporter
) -> None:
    job = make_job("w8a8-fp8", model=dead_input_model)
    manifest = run(job, reporter)
    (fallback,) = manifest.fallbacks
    assert (fallback.where, fallback.done) == ("model.layers.0.mlp.down_proj", "scale 1")
    assert open_weights(job.out).dequantized("model.layers.0.mlp.up_proj.weight").abs().max() == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": {"strategy": "block"}}, "per block"),
        ({"weights": {"num_bits": 4}}, "4 bits"),
        ({"input_activations": {"strategy": "group"}}, "inputs per group"),
        ({"output_activations": {"num_bits": 8}}, "quantizes outputs"),
    ],
)
def test_kinds_that_cannot_be_read_are_named(
    change: dict[str, dict[str, Any]],
    said: str,
    make_job: JobMaker,
    edit_config_group: ConfigEditor,
    reporter: Reporter,
) -> None:
    job = make_job("w8a8-fp8-dynamic")
    run(job, reporter)
    edit_config_group(job.out, change)
    with pytest.raises(Refused, match=said):
        open_weights(job.out)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("input_scale", torch.tensor([0.0]), "must be one positive"),
        ("input_scale", torch.tensor([float("nan")]), "must be one positive"),
        ("weight_scale", torch.ones(7), "does not belong"),
        ("weight_scale", torch.tensor([float("inf")]), "not finite"),
    ],
)
def test_damaged_scales_are_refused(
    name: str, tensor: Tensor, said: str, make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job("w8a8-fp8")
    run(job, reporter)
    path = job.out / "model.safetensors"
    module = "model.layers.0.mlp.up_proj"
    save_file(load_file(path) | {f"{module}.{name}": tensor}, path, metadata={"format": "pt"})
    with pytest.raises(Refused, match=said):
        open_weights(job.out).linear(module)
