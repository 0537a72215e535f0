"""Jobs with a budget: the plan is met, followed, declared in the checkpoint, or refused before work."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoModelForCausalLM

from bitsmith.core.artifact import find_finished
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import verify_files
from bitsmith.core.progress import Reporter
from bitsmith.quantize import sensitivity
from bitsmith.quantize.bit_plan import BIT_PLAN_NAME, read_units
from bitsmith.quantize.budget import Budget, read_budget
from bitsmith.quantize.deployment import Deployment
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

JobMaker = Callable[..., QuantizeJob]
ModelMaker = Callable[..., Path]


def budgeted(job: QuantizeJob, **budget: Any) -> QuantizeJob:
    return replace(job, budget=Budget(**budget))


def run(job: QuantizeJob, reporter: Reporter) -> dict[str, Any]:
    return dict(quantize_model(job, plan_quantize(job), reporter).details)


@pytest.mark.parametrize(
    ("name", "settings", "architecture"),
    [
        ("w4a16-gptq", {"kv_cache": "fp8"}, "llama"),
        ("w4a16-awq-gptq", {"symmetric": False}, "llama"),
        ("w3a16-rtn", {"group_size": "auto"}, "gemma3_text"),
        ("w4a16-awq", {"group_size": "channel"}, "qwen2"),
    ],
)
def test_the_plan_is_followed_and_declared(
    name: str,
    settings: dict[str, Any],
    architecture: str,
    make_job: JobMaker,
    make_model: ModelMaker,
    reporter: Reporter,
) -> None:
    job = budgeted(make_job(name, model=make_model(architecture), **settings), bits=4.7)
    manifest = quantize_model(job, plan_quantize(job), reporter)
    verify_files(job.out, manifest)
    plan = manifest.details["bit_plan"]
    assert 3.5 < plan["average_bits"] <= 4.7 and plan["num_bytes"] <= plan["limit_bytes"]
    assert len(plan["parts"]) > 1 and sum(part["num_modules"] for part in plan["parts"]) == 3 * 7
    source = open_weights(job.out)
    config = QuantizationConfig.model_validate(source.config["quantization_config"])
    declared = {target: group.weights for group in config.config_groups.values() for target in group.targets}
    stored_bits = num_weights = 0
    for record in manifest.details["modules"]:
        weight = source.linear(record["name"])
        assert isinstance(weight, QuantizedWeight)
        args = declared[record["name"]]
        assert (weight.num_bits, weight.group_size) == (record["num_bits"], record["group_size"])
        assert (args.num_bits, args.group_size or weight.in_features) == (weight.num_bits, weight.group_size)
        assert args.symmetric == weight.is_symmetric
        per_group = 16 + (0 if weight.is_symmetric else weight.num_bits)
        stored_bits += weight.values.numel() * weight.num_bits + weight.scale.numel() * per_group
        num_weights += weight.values.numel()
    assert stored_bits / num_weights == pytest.approx(plan["average_bits"], rel=1e-3)


def test_modules_that_engines_fuse_are_stored_alike(make_job: JobMaker, reporter: Reporter) -> None:
    job = budgeted(make_job(), bits=4.7)
    run(job, reporter)
    source = open_weights(job.out)
    for layer in range(3):
        for parts in (("self_attn", ("q", "k", "v")), ("mlp", ("gate", "up"))):
            names = [f"model.layers.{layer}.{parts[0]}.{part}_proj" for part in parts[1]]
            weights = [source.linear(name) for name in names]
            assert len({w.num_bits for w in weights if isinstance(w, QuantizedWeight)}) == 1


def test_transformers_loads_the_mix_with_our_weights(make_job: JobMaker, reporter: Reporter) -> None:
    job = budgeted(make_job(), bits=4.2)
    run(job, reporter)
    source = open_weights(job.out)
    theirs = AutoModelForCausalLM.from_pretrained(job.out, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    ours.load_state_dict({name: source.dequantized(name) for name in source.names}, strict=False)
    token_ids = torch.arange(20)[None] * 7 % 250
    with torch.no_grad():
        assert torch.equal(theirs(token_ids).logits, ours(token_ids).logits)


def test_a_size_budget_is_that_of_the_weight_files(make_job: JobMaker, reporter: Reporter) -> None:
    job = budgeted(make_job(kv_cache="fp8"), num_bytes=130_000)
    plan = plan_quantize(job)
    assert plan.estimate.output_bytes <= 130_000
    quantize_model(job, plan, reporter)
    size = sum(path.stat().st_size for path in job.out.glob("*.safetensors"))
    assert 110_000 < size <= 130_000


def test_a_larger_budget_loses_less(make_job: JobMaker, reporter: Reporter) -> None:
    expected, found = [], []
    for bits in (3.6, 4.6, 6.6):
        job = budgeted(make_job(out=f"{bits}", calibration={"num_samples": 32}), bits=bits)
        plan = plan_quantize(job)
        details = quantize_model(job, plan, reporter).details
        source = open_weights(job.out)
        model = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
        assert plan.windows is not None
        with torch.no_grad():
            logits = model(plan.windows.token_ids).logits
            model.load_state_dict({n: source.dequantized(n) for n in source.names}, strict=False)
            change = model(plan.windows.token_ids).logits - logits
        expected.append(details["bit_plan"]["error"])
        found.append(float(change.norm() / logits.norm()))
    assert expected == sorted(expected, reverse=True)
    assert found[0] > 1.2 * found[1] > 1.2 * found[2] > 0


def test_the_plan_beats_the_same_bytes_spent_evenly(make_job: JobMaker, reporter: Reporter) -> None:
    plan = run(budgeted(make_job(), bits=4.5), reporter)["bit_plan"]
    assert plan["best_uniform"]["choice"] == "4 bits, group 32"
    assert plan["error"] <= plan["best_uniform"]["error"]


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("phase", ["measuring", "quantizing"])
def test_an_interrupted_run_ends_in_the_same_bytes(
    layer: int,
    phase: str,
    make_job: JobMaker,
    fail_at: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    reporter: Reporter,
) -> None:
    def digest(job: QuantizeJob) -> str:
        return quantize_model(job, plan_quantize(job), reporter).content_digest

    whole = digest(budgeted(make_job(out="whole"), bits=4.2))
    with monkeypatch.context() as patch:
        if phase == "quantizing":
            fail_at(patch, layer, KeyboardInterrupt())
        else:
            fail_measuring(patch, layer)
        with pytest.raises(KeyboardInterrupt):
            digest(budgeted(make_job(), bits=4.2))
    measured = fail_measuring(monkeypatch, 99)
    resumed = budgeted(make_job(resume=True), bits=4.2)
    assert digest(resumed) == whole
    assert measured == ([] if phase == "quantizing" else list(range(layer, 3)))
    assert not list(resumed.out.glob("*state*"))


def fail_measuring(monkeypatch: pytest.MonkeyPatch, layer: int) -> list[int]:
    genuine = sensitivity.SensitivityMeter._measure_layer
    done: list[int] = []

    def measure(self: sensitivity.SensitivityMeter, index: int, *args: Any) -> Any:
        if index == layer:
            raise KeyboardInterrupt
        done.append(index)
        return genuine(self, index, *args)

    monkeypatch.setattr(sensitivity.SensitivityMeter, "_measure_layer", measure)
    return done


def test_another_budget_is_another_run_and_another_artifact(
    make_job: JobMaker, fail_at: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, reporter: Reporter
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(budgeted(make_job(), bits=4.2), reporter)
    with pytest.raises(Refused, match=r"config\.budget\.bits was 4\.2 and is now 4\.4"):
        run(budgeted(make_job(resume=True), bits=4.4), reporter)
    job = budgeted(make_job(resume=True), bits=4.2)
    run(job, reporter)
    assert find_finished(job.out, plan_quantize(job).stage_key) is not None
    assert find_finished(job.out, plan_quantize(make_job()).stage_key) is None


def test_measurements_are_taken_over_for_another_budget_only_of_the_same_model(
    make_job: JobMaker, make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch, reporter: Reporter
) -> None:
    first = budgeted(make_job(out="first"), bits=4.2)
    run(first, reporter)
    second = budgeted(make_job(out="second"), bits=5.0)
    whole = quantize_model(second, plan_quantize(second), reporter).content_digest
    measured = fail_measuring(monkeypatch, 99)
    again = replace(budgeted(make_job(out="again"), bits=5.0), measured=first.out / BIT_PLAN_NAME)
    assert quantize_model(again, plan_quantize(again), reporter).content_digest == whole
    assert measured == []
    assert read_units(first.out / BIT_PLAN_NAME) == read_units(again.out / BIT_PLAN_NAME)
    other = budgeted(make_job(model=make_model("qwen3"), out="other"), bits=5.0)
    with pytest.raises(Refused, match="measured for another model"):
        run(replace(other, measured=first.out / BIT_PLAN_NAME), reporter)


def test_a_module_without_inputs_takes_the_fewest_bytes(
    make_job: JobMaker, dead_input_model: Path, reporter: Reporter
) -> None:
    job = budgeted(make_job(model=dead_input_model), bits=4.2)
    run(job, reporter)
    body = json.loads((job.out / BIT_PLAN_NAME).read_text())
    (unit,) = [unit for unit in body["units"] if unit["modules"] == ["model.layers.0.mlp.down_proj"]]
    assert all(option["error"] == 0 for option in unit["options"])
    weight = open_weights(job.out).linear("model.layers.0.mlp.down_proj")
    assert isinstance(weight, QuantizedWeight) and weight.num_bits == 2


@pytest.mark.parametrize(
    ("name", "settings", "budget", "named"),
    [
        ("w4a16-gptq", {}, {"bits": 2.4}, r"take 2\.500 to 8\.500 bits a weight.*Give a larger budget"),
        ("w4a16-gptq", {"symmetric": False}, {"bits": 2.4}, r"take 2\.56\d to 8\.75\d bits"),
        ("w4a16-gptq", {}, {"num_bytes": 50_000}, r"weight files 0\.\d\d to 0\.\d\d MB"),
        ("w8a8-int8", {}, {"bits": 5.0}, "has none to choose from"),
        ("none", {}, {"bits": 5.0}, "has none to choose from"),
        ("w4a16-gptq", {"format": "gptq"}, {"bits": 5.0}, "one width for all modules"),
        ("w4a16-gptq", {"format": "awq"}, {"bits": 5.0}, "one width for all modules"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_is_written(
    name: str, settings: dict[str, Any], budget: dict[str, Any], named: str, make_job: JobMaker
) -> None:
    job = budgeted(make_job(name, **settings), **budget)
    with pytest.raises(Refused, match=named):
        plan_quantize(job)
    assert not list(job.out.parent.glob("out*"))


def test_targets_restrict_the_widths_or_refuse(make_job: JobMaker, make_model: ModelMaker) -> None:
    model = make_model(hidden_size=128, intermediate_size=128, head_dim=32)
    job = budgeted(make_job(model=model, group_size="auto"), bits=5.0)
    plan = plan_quantize(replace(job, deployment=Deployment("vllm")))
    assert plan.budget is not None
    assert {choice.num_bits for choice in plan.budget.choices} == {4, 8}
    for target in ("tensorrt-llm", "tensorrt-llm-pytorch"):
        with pytest.raises(Refused, match=f"--for {target}: exports to it have one width"):
            plan_quantize(replace(job, deployment=Deployment(target)))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("90MB", 90_000_000), ("4.2GB", 4_200_000_000), ("1.5 GiB", 3 << 29), ("123456", 123456), ("8kB", 8000)],
)
def test_sizes_are_read_with_their_units(text: str, num_bytes: int) -> None:
    assert read_budget(None, text) == Budget(num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("bits", "size", "named"),
    [
        (4.0, "90MB", "give one of them"),
        (0.0, None, "positive"),
        (float("nan"), None, "positive"),
        (None, "90 apples", "90MB or 4.2GB"),
        (None, "-3MB", "90MB or 4.2GB"),
        (None, "0B", "90MB or 4.2GB"),
    ],
)
def test_other_budgets_are_refused(bits: float | None, size: str | None, named: str) -> None:
    with pytest.raises(Refused, match=named):
        read_budget(bits, size)
