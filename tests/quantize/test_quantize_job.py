"""A whole quantize job on a tiny model: what is written, what is said, and that it is reproducible."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from bitsmith.core.artifact import find_finished
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import Manifest, verify_files
from bitsmith.core.progress import Reporter
from bitsmith.quantize import job as job_module
from bitsmith.quantize.checkpoint_output import write_weights
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

JobMaker = Callable[..., QuantizeJob]
SCHEMES = [
    ("w4a16-gptq", {}),
    ("w4a16-gptq", {"symmetric": False, "act_order": True, "kv_cache": "fp8"}),
    ("w4a16-rtn", {"group_size": "channel"}),
    ("w8a16-gptq", {"act_order": True, "kv_cache": "fp8"}),
    ("w8a16-rtn", {"symmetric": False, "kv_cache": "fp8"}),
    ("w4a16-rtn", {"kv_cache": "int8"}),
    ("w4a16-awq", {"kv_cache": "fp8"}),
    ("w8a16-awq-gptq", {"symmetric": False}),
    ("w2a16-gptq", {"symmetric": False}),
    ("w3a16-awq", {}),
    ("w3a16-rtn", {"group_size": "channel", "symmetric": False}),
]


def run(job: QuantizeJob, reporter: Reporter) -> Manifest:
    return quantize_model(job, plan_quantize(job), reporter)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    token_ids = torch.arange(40).view(2, 20) * 5 % 250
    result = model(token_ids).logits
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize(("name", "settings"), SCHEMES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_transformers_loads_the_checkpoint_with_our_weights(
    name: str,
    settings: dict[str, object],
    architecture: str,
    make_job: JobMaker,
    make_model: Callable[..., Path],
    reporter: Reporter,
) -> None:
    # transformers' default way of loading does not expect packed zero points; its dequantizing way does,
    # and computes in the scale's type, so exact equality there wants fp32 scales.
    symmetric = settings.get("symmetric", True)
    model = make_model(architecture, dtype=torch.bfloat16 if symmetric else torch.float32, bias=True)
    job = make_job(name, model=model, **settings)
    manifest = run(job, reporter)
    verify_files(job.out, manifest)
    source = open_weights(job.out)
    way = {} if symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(job.out, dtype=torch.float32, **way)
    ours = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    original = logits(ours)
    ours.load_state_dict({name: source.dequantized(name) for name in source.names}, strict=False)
    assert torch.equal(logits(theirs), logits(ours))
    assert not torch.equal(original, logits(ours))
    config = QuantizationConfig.model_validate(source.config["quantization_config"])
    group = config.config_groups["group_0"].weights
    assert (group.num_bits, group.symmetric) == (job.scheme.num_bits, job.scheme.symmetric)
    assert group.group_size == (None if job.scheme.group_size == "channel" else 32)
    assert source.kv_cache_type == job.scheme.kv_cache
    assert (source.kv_scales(2) is None) == (job.scheme.kv_cache == "none")
    declared = config.kv_cache_scheme
    number_type = None if declared is None else (declared.type, declared.num_bits, declared.symmetric)
    expected = {"none": None, "fp8": ("float", 8, True), "int8": ("int", 8, True)}
    assert number_type == expected[job.scheme.kv_cache]


def test_int8_and_fp8_scales_tell_the_same_largest_magnitudes(make_job: JobMaker, reporter: Reporter) -> None:
    made = {}
    for kv_cache in ("fp8", "int8"):
        job = make_job("none", out=kv_cache, kv_cache=kv_cache)
        run(job, reporter)
        made[kv_cache] = open_weights(job.out)
    for layer in range(3):
        fp8, int8 = made["fp8"].kv_scales(layer), made["int8"].kv_scales(layer)
        assert fp8 is not None and int8 is not None
        assert [s * 448 for s in fp8] == pytest.approx([s * 127 for s in int8], rel=1e-6)


@pytest.mark.parametrize(
    "change", [{"type": "int", "symmetric": False}, {"dynamic": True}, {"num_bits": 4}, {"strategy": "token"}]
)
def test_a_kv_cache_that_cannot_be_read_is_refused(
    change: dict[str, object], make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job("none", kv_cache="int8")
    run(job, reporter)
    config = json.loads((job.out / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= change
    (job.out / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="FP8 and INT8 with a static symmetric scale"):
        open_weights(job.out)


def test_the_scale_search_and_compensation_pay(make_job: JobMaker, reporter: Reporter) -> None:
    def error(name: str) -> float:
        job = make_job(name, out=name, kv_cache="fp8", calibration={"num_samples": 64})
        plan = plan_quantize(job)
        quantize_model(job, plan, reporter)
        source = open_weights(job.out)
        model = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
        assert plan.windows is not None
        with torch.no_grad():
            expected = model(plan.windows.token_ids).logits
            model.load_state_dict({n: source.dequantized(n) for n in source.names}, strict=False)
            return float((model(plan.windows.token_ids).logits - expected).norm() / expected.norm())

    assert error("w4a16-gptq") < 0.9 * error("w4a16-rtn")
    assert error("w8a16-gptq") < 0.1 * error("w4a16-gptq")
    assert error("w4a16-gptq") < error("w3a16-gptq") < error("w2a16-gptq")


def test_manifest_says_what_was_done(make_job: JobMaker, reporter: Reporter) -> None:
    job = make_job(group_size="auto", kv_cache="fp8", calibration={"num_samples": 1000})
    manifest = run(job, reporter)
    assert manifest.kind == "quantized-checkpoint"
    assert manifest.config["scheme"]["group_size"] == 32
    details = manifest.details
    assert len(details["modules"]) == 3 * 7
    record = next(r for r in details["modules"] if r["name"] == "model.layers.1.mlp.down_proj")
    assert (record["method"], record["num_bits"], record["group_size"]) == ("gptq", 4, 32)
    assert 0 < record["relative_error"] < 1 and record["sqnr_db"] > 5 and record["damping"] == 0.01
    assert len(details["kv_scales"]) == 3 and all(0 < s < 1 for pair in details["kv_scales"] for s in pair)
    # Fewer rows than asked for: both numbers are there.
    calibration = details["calibration"]
    assert calibration["num_requested"] == 1000 and 10 < calibration["num_obtained"] < 1000
    assert calibration["num_tokens"] == calibration["num_obtained"] * 32
    assert [fallback.where for fallback in manifest.fallbacks] == ["calibration"]
    assert manifest.fallbacks[0].asked == "1000 rows of 32 tokens"
    unquantized = {entry["name"]: entry for entry in details["unquantized"]}
    assert unquantized["model.embed_tokens"]["num_bytes"] == 260 * 64 * 2
    assert "outside the decoder layers" in unquantized["lm_head"]["reason"]
    assert find_finished(job.out, plan_quantize(job).stage_key) is not None


def test_side_files_are_copied_byte_for_byte(
    make_job: JobMaker, make_model: Callable[..., Path], reporter: Reporter, tmp_path: Path
) -> None:
    model = copy_of(make_model(), tmp_path)
    (model / "notes.bin.txt").write_bytes(b"\x00\xff side file")
    (model / "pytorch_model.bin").write_bytes(b"never read")
    (model / "modeling_tiny.py").write_text("raise SystemExit")
    (model / "onnx").mkdir()
    job = make_job(model=model)
    manifest = run(job, reporter)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (job.out / name).read_bytes() == (model / name).read_bytes()
    assert (job.out / "notes.bin.txt").read_bytes() == b"\x00\xff side file"
    assert manifest.details["files_not_copied"] == ["modeling_tiny.py", "onnx", "pytorch_model.bin"]
    config = json.loads((job.out / "config.json").read_text())
    config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    assert not (job.out / "resume-state").exists()


def copy_of(model: Path, tmp_path: Path) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_tied_embedding_stays_one_copy(
    make_job: JobMaker, make_model: Callable[..., Path], reporter: Reporter
) -> None:
    job = make_job(model=make_model(tie_word_embeddings=True))
    manifest = run(job, reporter)
    names = open_weights(job.out).names
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert json.loads((job.out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head" not in {entry["name"] for entry in manifest.details["unquantized"]}
    theirs = AutoModelForCausalLM.from_pretrained(job.out, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)


def test_same_inputs_give_the_same_bytes_and_leave_the_random_state(
    make_job: JobMaker, reporter: Reporter
) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = run(make_job(out="first", act_order=True, kv_cache="fp8"), reporter)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second = run(make_job(out="second", act_order=True, kv_cache="fp8"), reporter)
    assert first.content_digest == second.content_digest and first.stage_key == second.stage_key


def test_refinement_is_on_record_for_every_layer_and_repeats(make_job: JobMaker, reporter: Reporter) -> None:
    plain = run(make_job("w4a16-rtn", out="plain"), reporter)
    torch.manual_seed(5)
    first = run(make_job("w4a16-rtn", out="first", refine_steps=8, kv_cache="fp8"), reporter)
    torch.manual_seed(6)
    second = run(make_job("w4a16-rtn", out="second", refine_steps=8, kv_cache="fp8"), reporter)
    assert first.content_digest == second.content_digest
    records = first.details["refine"]
    assert [record["layer"] for record in records] == [f"model.layers.{index}" for index in range(3)]
    assert plain.details["refine"] == []
    for record in records:
        assert record["kept"] is (record["held_out_after"] < record["held_out_before"])
        assert len(record["losses"]) == 8
        methods = {m["method"] for m in first.details["modules"] if m["name"].startswith(record["layer"])}
        assert methods == ({"rtn+signround"} if record["kept"] else {"rtn"})
    assert any(record["kept"] for record in records)


def test_scheme_none_copies_weights_and_can_add_kv_scales(make_job: JobMaker, reporter: Reporter) -> None:
    plain, scaled = make_job("none", out="plain"), make_job("none", out="scaled", kv_cache="fp8")
    run(plain, reporter)
    run(scaled, reporter)
    source = load_file(plain.model.path / "model.safetensors")
    for job in (plain, scaled):
        written = load_file(job.out / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in source.items())
    assert "quantization_config" not in json.loads((plain.out / "config.json").read_text())
    weights = open_weights(scaled.out)
    assert weights.kv_cache_type == "fp8" and weights.kv_scales(1) is not None
    theirs = AutoModelForCausalLM.from_pretrained(scaled.out, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(plain.model.path, dtype=torch.float32)
    assert torch.equal(logits(theirs), logits(ours))


def test_too_little_information_ends_with_finite_weights(
    make_job: JobMaker, reporter: Reporter, tmp_path: Path
) -> None:
    rows = tmp_path / "one_row.jsonl"
    rows.write_text((json.dumps({"text": "same row"}) + "\n") * 32)
    job = make_job(calibration={"source": str(rows), "num_samples": 32, "seq_len": 8}, kv_cache="fp8")
    manifest = run(job, reporter)
    source = open_weights(job.out)
    for name in source.names:
        assert bool(torch.isfinite(source.dequantized(name)).all()), name
    named = {fallback.where for fallback in manifest.fallbacks}
    for record in manifest.details["modules"]:
        assert (record["damping"] == 0.01 and record["method"] == "gptq") or record["name"] in named


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(
    poison: float, make_job: JobMaker, make_model: Callable[..., Path], reporter: Reporter, tmp_path: Path
) -> None:
    model = copy_of(make_model(), tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = poison
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    job = make_job(model=model)
    with pytest.raises(Refused, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        run(job, reporter)
    assert not job.out.with_name("out.partial").exists()


def test_all_zero_and_dead_parts_stay_finite(
    make_job: JobMaker, make_model: Callable[..., Path], reporter: Reporter, tmp_path: Path
) -> None:
    model = copy_of(make_model(), tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()  # so down_proj's inputs are dead
    tensors["model.layers.1.self_attn.v_proj.weight"].zero_()  # so V of the cache is all zero
    tensors["model.layers.2.self_attn.q_proj.weight"][:, :32] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    job = make_job(model=model, kv_cache="fp8")
    manifest = run(job, reporter)
    source = open_weights(job.out)
    assert all(bool(torch.isfinite(source.dequantized(name)).all()) for name in source.names)
    assert source.dequantized("model.layers.0.mlp.up_proj.weight").abs().max() == 0
    reasons = {fallback.where: fallback for fallback in manifest.fallbacks}
    assert reasons["model.layers.0.mlp.down_proj"].done == "round to nearest"
    assert reasons["model.layers.1.self_attn"].done == "scale 1"


@pytest.mark.usefixtures("fresh_process")
def test_what_was_written_wrong_is_not_published(
    make_job: JobMaker, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = write_weights

    def damage(*args: object) -> None:
        genuine(*args)  # type: ignore[arg-type]
        path = args[2] / "model.safetensors"  # type: ignore[operator]
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not views of the file
        tensors["model.layers.1.mlp.up_proj.weight_packed"][0, 0] += 1
        save_file(tensors, path)

    monkeypatch.setattr(job_module, "write_weights", damage)
    job = make_job("w4a16-rtn")
    with pytest.raises(WorkFailed, match=r"model\.layers\.1\.mlp\.up_proj"):
        run(job, reporter)
    assert not job.out.exists()


def test_linear_gives_integers_and_other_tensors_come_as_stored(
    make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job("w4a16-rtn", symmetric=False)
    run(job, reporter)
    source = open_weights(job.out)
    weight = source.linear("model.layers.0.mlp.down_proj")
    assert isinstance(weight, QuantizedWeight) and weight.group_size == 32 and weight.zero_point is not None
    assert torch.equal(weight.dequantize(), source.dequantized("model.layers.0.mlp.down_proj.weight"))
    assert source.tensor("model.norm.weight").dtype == torch.bfloat16
    assert isinstance(source.linear("lm_head"), torch.Tensor)
    with pytest.raises(Refused, match="nothing_here"):
        source.tensor("nothing_here")
