"""AWQ on tiny models: what is folded is written, read again, on record, and changes no function."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bitsmith.core.errors import WorkFailed
from bitsmith.core.manifest import Manifest
from bitsmith.core.progress import Reporter
from bitsmith.quantize import job as job_module
from bitsmith.quantize import layer_smoother
from bitsmith.quantize.checkpoint_output import write_weights
from bitsmith.quantize.deployment import Deployment
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight_source import open_weights

JobMaker = Callable[..., QuantizeJob]
ModelMaker = Callable[..., Path]
ModelEditor = Callable[[Path, Callable[[dict[str, Tensor]], None]], Path]
NORMS = ("input_layernorm", "post_attention_layernorm")


def run(job: QuantizeJob, reporter: Reporter) -> Manifest:
    return quantize_model(job, plan_quantize(job), reporter)


@torch.no_grad()
def logits(job: QuantizeJob, checkpoint: Path | None) -> Tensor:
    """Of the source, or of it with a checkpoint's dequantized weights."""
    model = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    if checkpoint is not None:
        source = open_weights(checkpoint)
        model.load_state_dict({name: source.dequantized(name) for name in source.names}, strict=False)
    result = model(torch.arange(60).view(2, 30) * 5 % 250).logits
    assert isinstance(result, Tensor)
    return result


def lost(job: QuantizeJob) -> float:
    expected = logits(job, None)
    return float((logits(job, job.out) - expected).norm() / expected.norm())


@pytest.fixture
def outlier_model(make_model: ModelMaker, edit_model: ModelEditor) -> Path:
    """Some channels carry much larger activations than others, as in trained models: norms of uneven gain."""
    generator = torch.Generator().manual_seed(0)

    def spread_gains(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "layernorm" in name:
                tensor.mul_(torch.exp(1.2 * torch.randn(64, generator=generator)))

    return edit_model(make_model(dtype=torch.float32), spread_gains)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_eight_bits_are_as_near_the_source_as_plain_rounding_of_it(
    architecture: str, make_job: JobMaker, make_model: ModelMaker, reporter: Reporter
) -> None:
    """What folding alone changed would show here: eight bits lose almost nothing."""
    model = make_model(architecture)
    plain, awq = (make_job(name, model=model, out=name) for name in ("w8a16-rtn", "w8a16-awq"))
    for job in (plain, awq):
        run(job, reporter)
    assert lost(awq) < 1.25 * lost(plain) < 0.05


def test_scales_and_clips_pay_where_channels_differ(
    outlier_model: Path, make_job: JobMaker, reporter: Reporter
) -> None:
    errors = {}
    for name in ("w4a16-rtn", "w4a16-awq", "w4a16-awq-gptq"):
        job = make_job(name, out=name, model=outlier_model, calibration={"num_samples": 40})
        run(job, reporter)
        errors[name] = lost(job)
    assert errors["w4a16-awq"] < 0.8 * errors["w4a16-rtn"]
    assert errors["w4a16-awq-gptq"] < errors["w4a16-awq"]


def test_the_record_says_what_was_folded_where(
    outlier_model: Path, make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job("w4a16-awq", model=outlier_model)
    manifest = run(job, reporter)
    records = {record["name"]: record for record in manifest.details["modules"]}
    assert {record["method"] for record in records.values()} == {"awq"}
    assert all(0 <= record["alpha"] <= 1 and record["relative_error"] > 0 for record in records.values())
    prefix = "model.layers.1"
    folded = {
        name: records[f"{prefix}.{name}"]["folded_into"] for name in ("self_attn.k_proj", "mlp.down_proj")
    }
    assert folded == {
        "self_attn.k_proj": f"{prefix}.input_layernorm",
        "mlp.down_proj": f"{prefix}.mlp.up_proj",
    }
    assert records[f"{prefix}.self_attn.q_proj"]["alpha"] > 0 and not manifest.fallbacks
    source, written = (load_file(path / "model.safetensors") for path in (outlier_model, job.out))
    changed = set(manifest.details["changed"])
    assert changed and changed <= {f"model.layers.{i}.{norm}.weight" for i in range(3) for norm in NORMS}
    for name in source.keys() & written.keys():
        assert torch.equal(source[name], written[name]) is (name not in changed), name
        assert source[name].dtype == written[name].dtype


def test_a_bias_of_the_operator_before_is_written_too(
    make_job: JobMaker, make_model: ModelMaker, edit_model: ModelEditor, reporter: Reporter
) -> None:
    generator = torch.Generator().manual_seed(3)

    def spread_rows(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("up_proj.bias"):
                tensor.copy_(torch.randn(96, generator=generator))
            if name.endswith("up_proj.weight"):
                tensor.mul_(torch.exp2(torch.randint(-3, 4, (96, 1), generator=generator)))

    model = edit_model(make_model(mlp_bias=True), spread_rows)
    plain, awq = (make_job(name, model=model, out=name) for name in ("w8a16-rtn", "w8a16-awq"))
    run(plain, reporter)
    manifest = run(awq, reporter)
    assert any(name.endswith("up_proj.bias") for name in manifest.details["changed"])
    assert lost(awq) < 1.1 * lost(plain)


def test_a_fold_that_would_change_the_function_is_undone_and_reported(
    make_job: JobMaker, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_smoother, "_LARGEST_CHANGE", -1.0)  # nothing is good enough
    job = make_job("w4a16-awq")
    manifest = run(job, reporter)
    assert len(manifest.fallbacks) == 3 * 7
    assert all("changed the layer's output" in fallback.reason for fallback in manifest.fallbacks)
    assert manifest.details["changed"] == []
    assert all(record["alpha"] is None for record in manifest.details["modules"])
    source, written = (load_file(path / "model.safetensors") for path in (job.model.path, job.out))
    assert all(torch.equal(source[name], written[name]) for name in source.keys() & written.keys())
    plain = make_job("w4a16-rtn", out="plain")
    run(plain, reporter)
    assert lost(job) < lost(plain)


def test_dead_inputs_are_left_out_and_reported(
    make_job: JobMaker, dead_input_model: Path, reporter: Reporter
) -> None:
    job = make_job("w4a16-awq", model=dead_input_model)
    manifest = run(job, reporter)
    found = [(fallback.where, fallback.done) for fallback in manifest.fallbacks]
    assert found == [
        ("model.layers.0.mlp.down_proj", "awq without scales"),
        ("model.layers.0.mlp.down_proj", "round to nearest"),
    ]
    source = open_weights(job.out)
    assert all(bool(torch.isfinite(source.dequantized(name)).all()) for name in source.names)


@pytest.mark.usefixtures("fresh_process")
def test_a_folded_norm_that_was_written_wrong_is_not_published(
    outlier_model: Path, make_job: JobMaker, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = write_weights

    def damage(*args: object) -> None:
        genuine(*args)  # type: ignore[arg-type]
        path = args[2] / "model.safetensors"  # type: ignore[operator]
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        tensors["model.layers.1.input_layernorm.weight"][7] *= 1.01
        save_file(tensors, path)

    monkeypatch.setattr(job_module, "write_weights", damage)
    job = make_job("w4a16-awq", model=outlier_model)
    with pytest.raises(WorkFailed, match=r"model\.layers\.1\.input_layernorm\.weight"):
        run(job, reporter)
    assert not job.out.exists()


def test_refinement_starts_from_the_folded_weights(
    outlier_model: Path, make_job: JobMaker, reporter: Reporter
) -> None:
    plain, refined = (
        make_job("w4a16-awq", model=outlier_model, out=f"steps{steps}", refine_steps=steps)
        for steps in (0, 12)
    )
    run(plain, reporter)
    manifest = run(refined, reporter)
    kept = [record for record in manifest.details["refine"] if record["kept"]]
    assert kept and all(record["held_out_before"] < 0.2 for record in kept)
    assert {record["method"] for record in manifest.details["modules"]} & {"awq+signround"}
    assert lost(refined) < 1.2 * lost(plain)


@pytest.mark.parametrize("name", ["w4a16-awq", "w4a16-awq-gptq"])
def test_planned_for_tensorrt_no_scale_is_negative(
    name: str, make_job: JobMaker, make_model: ModelMaker, reporter: Reporter
) -> None:
    model = make_model(hidden_size=128, intermediate_size=128, head_dim=32)
    job = make_job(name, model=model, group_size="auto")
    job = QuantizeJob(job.model, job.scheme, job.calibration, job.out, False, Deployment("tensorrt-llm"))
    run(job, reporter)
    scales = [t for n, t in load_file(job.out / "model.safetensors").items() if n.endswith("weight_scale")]
    assert scales and all(bool((scale > 0).all()) for scale in scales)
