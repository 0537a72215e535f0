"""w8a8-int8 on tiny models: files that other tools load, scales from calibration, resume, refusals."""

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
from bitsmith.quantize.deployment import Deployment, DeploymentTarget
from bitsmith.quantize.int8_weight import Int8Weight, round_inputs
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight_source import open_weights

JobMaker = Callable[..., QuantizeJob]
ModelMaker = Callable[..., Path]
ModelEditor = Callable[[Path, Callable[[dict[str, Tensor]], None]], Path]
ConfigEditor = Callable[[Path, dict[str, dict[str, Any]]], None]
Saboteur = Callable[[pytest.MonkeyPatch, int, BaseException], list[int]]
REACHES = ("token", "tensor")


def run(job: QuantizeJob, reporter: Reporter) -> Manifest:
    return quantize_model(job, plan_quantize(job), reporter)


@torch.no_grad()
def logits(model: nn.Module, job: QuantizeJob) -> Tensor:
    """On the calibration tokens: static scales clip what they never saw."""
    windows = plan_quantize(job).windows
    assert windows is not None
    result = model(windows.token_ids[:2]).logits
    assert isinstance(result, Tensor)
    return result


def dense(job: QuantizeJob) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    return model


def round_as_they_do(rows: Tensor, input_scale: float | None) -> Tensor:
    """compressed-tensors puts a token's largest input at 127.5 steps, we and most kernels at 127."""
    scale = rows.abs().amax(dim=1, keepdim=True) / 127.5 if input_scale is None else torch.tensor(input_scale)
    return (rows / scale).round().clamp(-128, 127) * scale


def simulated(job: QuantizeJob, rounding: Callable[[Tensor, float | None], Tensor]) -> nn.Module:
    """The dense model with our dequantized weights and inputs rounded by our reading of the file."""
    source, model = open_weights(job.out), dense(job)
    model.load_state_dict({name: source.dequantized(name) for name in source.names}, strict=False)

    def hook_for(weight: Int8Weight) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (rounding(args[0].flatten(0, -2), weight.input_scale).view_as(args[0]),)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            weight = source.linear(name)
            assert isinstance(weight, Int8Weight), name
            module.register_forward_pre_hook(hook_for(weight))
    return model


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_transformers_computes_what_the_checkpoint_says(
    reach: str, architecture: str, make_job: JobMaker, make_model: ModelMaker, reporter: Reporter
) -> None:
    job = make_job("w8a8-int8", activation_scale=reach, model=make_model(architecture), kv_cache="fp8")
    run(job, reporter)
    theirs = logits(AutoModelForCausalLM.from_pretrained(job.out, dtype=torch.float32), job)
    assert difference(theirs, logits(simulated(job, round_as_they_do), job)) < 2e-3
    expected = logits(dense(job), job)
    assert 1e-3 < difference(logits(simulated(job, round_inputs), job), expected) < 0.1


@pytest.mark.parametrize("reach", REACHES)
def test_names_dtypes_and_config_are_those_of_int_quantized(
    reach: str, make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job("w8a8-int8", activation_scale=reach)
    run(job, reporter)
    tensors = load_file(job.out / "model.safetensors")
    module = "model.layers.1.mlp.gate_proj"
    stored = {key.removeprefix(f"{module}."): tensor for key, tensor in tensors.items() if module in key}
    assert stored["weight"].dtype == torch.int8 and stored["weight"].shape == (96, 64)
    assert stored["weight_scale"].dtype == torch.bfloat16 and stored["weight_scale"].shape == (96, 1)
    assert bool((stored["weight_scale"] > 0).all())
    assert ("input_scale" in stored) == (reach == "tensor")
    config = QuantizationConfig.model_validate(
        json.loads((job.out / "config.json").read_text())["quantization_config"]
    )
    assert config.format == "int-quantized"
    group = config.config_groups["group_0"]
    assert (str(group.weights.strategy), str(group.weights.type)) == ("channel", "int")
    assert (str(group.input_activations.strategy), group.input_activations.dynamic) == (
        reach,
        reach == "token",
    )
    assert open_weights(job.out).int8_activations == reach


def test_static_scales_are_the_maxima_of_the_smoothed_inputs(make_job: JobMaker, reporter: Reporter) -> None:
    job = make_job("w8a8-int8", activation_scale="tensor")
    plan = plan_quantize(job)
    assert plan.windows is not None
    manifest = quantize_model(job, plan, reporter)
    source = open_weights(job.out)
    model = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    norm = "model.layers.0.input_layernorm.weight"
    model.load_state_dict({norm: source.dequantized(norm)}, strict=False)
    seen: list[Tensor] = []
    first = model.model.layers[0].self_attn.q_proj
    first.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(plan.windows.token_ids)
    q, k = (source.linear(f"model.layers.0.self_attn.{part}_proj") for part in "qk")
    assert isinstance(q, Int8Weight) and isinstance(k, Int8Weight)
    assert q.input_scale is not None and q.input_scale == k.input_scale
    assert q.input_scale == pytest.approx(float(seen[0].abs().max()) / 127, rel=1e-5)
    record = manifest.details["modules"][0]
    assert record["method"] == "int8" and 0 < record["relative_error"] < 0.05
    assert record["folded_into"] == "model.layers.0.input_layernorm"


def test_smoothing_pays_where_channels_are_outliers(
    make_job: JobMaker, make_model: ModelMaker, edit_model: ModelEditor, reporter: Reporter
) -> None:
    def make_outliers(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "layernorm" not in name:
                continue
            tensor[[5, 20]] *= 60
            prefix = name.rpartition(".")[0].rpartition(".")[0]
            kinds = ("self_attn.q", "self_attn.k", "self_attn.v")
            for kind in kinds if "input_" in name else ("mlp.gate", "mlp.up"):
                tensors[f"{prefix}.{kind}_proj.weight"][:, [5, 20]] /= 60

    model = edit_model(make_model(dtype=torch.float32), make_outliers)
    job = make_job("w8a8-int8", activation_scale="tensor", model=model)
    manifest = run(job, reporter)
    alphas = {r["name"]: r["alpha"] for r in manifest.details["modules"] if "q_proj" in r["name"]}
    assert all(alpha > 0.2 for alpha in alphas.values())
    assert difference(logits(simulated(job, round_inputs), job), logits(dense(job), job)) < 0.1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 32}, "group_size is 32.*per output channel"),
        ({"symmetric": False}, "INT8 has no zero points"),
        ({"act_order": True}, "act_order"),
        ({"refine_steps": 5}, "refine is on"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(
    settings: dict[str, Any], said: str, make_job: JobMaker
) -> None:
    with pytest.raises(Refused, match=said):
        plan_quantize(make_job("w8a8-int8", **settings))


@pytest.mark.parametrize(
    ("target", "reach", "said"),
    [
        ("tensorrt-llm", "token", "--activation-scale tensor"),
        ("tensorrt-llm-pytorch", "tensor", "no linear method with INT8"),
    ],
)
def test_targets_that_cannot_take_it_say_so(
    target: DeploymentTarget, reach: str, said: str, make_job: JobMaker
) -> None:
    job = make_job("w8a8-int8", activation_scale=reach)
    job = QuantizeJob(job.model, job.scheme, job.calibration, job.out, False, Deployment(target))
    with pytest.raises(Refused, match=said):
        plan_quantize(job)


def test_the_estimate_is_the_size_that_is_written(make_job: JobMaker, reporter: Reporter) -> None:
    for reach in REACHES:
        job = make_job("w8a8-int8", activation_scale=reach, out=reach, kv_cache="fp8")
        plan = plan_quantize(job)
        quantize_model(job, plan, reporter)
        tensors = load_file(job.out / "model.safetensors")
        assert sum(tensor.nbytes for tensor in tensors.values()) == plan.estimate.output_bytes


@pytest.mark.parametrize("reach", REACHES)
def test_interrupted_ends_in_the_same_bytes(
    reach: str, make_job: JobMaker, fail_at: Saboteur, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"activation_scale": reach, "kv_cache": "fp8"}
    expected = run(make_job("w8a8-int8", out="whole", **settings), reporter).content_digest
    with monkeypatch.context() as patch:
        fail_at(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(make_job("w8a8-int8", **settings), reporter)
    assert run(make_job("w8a8-int8", resume=True, **settings), reporter).content_digest == expected


def test_an_input_of_zeros_gets_scale_one_and_is_reported(
    make_job: JobMaker, dead_input_model: Path, reporter: Reporter
) -> None:
    manifest = run(make_job("w8a8-int8", activation_scale="tensor", model=dead_input_model), reporter)
    found = [(fallback.where.rpartition(".")[2], fallback.done) for fallback in manifest.fallbacks]
    assert found == [("down_proj", "smoothquant without scales"), ("down_proj", "scale 1")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": {"strategy": "group"}}, "per group"),
        ({"weights": {"num_bits": 4}}, "4 bits"),
        ({"weights": {"symmetric": False}}, "symmetric INT8"),
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
    job = make_job("w8a8-int8")
    run(job, reporter)
    edit_config_group(job.out, change)
    with pytest.raises(Refused, match=said):
        open_weights(job.out)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("input_scale", torch.tensor([0.0]), "must be one positive"),
        ("weight_scale", torch.ones(7), "must hold one finite"),
        ("weight_scale", torch.full((96, 1), float("inf")), "must hold one finite"),
        ("weight", torch.zeros(96, 64), "expected I8"),
    ],
)
def test_damaged_tensors_are_refused(
    name: str, tensor: Tensor, said: str, make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job("w8a8-int8", activation_scale="tensor")
    run(job, reporter)
    path = job.out / "model.safetensors"
    module = "model.layers.0.mlp.up_proj"
    save_file(load_file(path) | {f"{module}.{name}": tensor}, path, metadata={"format": "pt"})
    with pytest.raises(Refused, match=said):
        open_weights(job.out).linear(module)
