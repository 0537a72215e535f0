"""What is refused before work, and what the resolved plan says."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitsmith.core.errors import Refused
from bitsmith.quantize.job import QuantizeJob, plan_quantize

JobMaker = Callable[..., QuantizeJob]


def assert_nothing_written(job: QuantizeJob) -> None:
    assert not list(job.out.parent.glob("out*")) and not list(job.out.parent.glob(".out*"))


def test_group_size_that_does_not_divide_names_kinds_columns_and_what_fits(make_job: JobMaker) -> None:
    job = make_job(group_size=48)
    with pytest.raises(Refused) as caught:
        plan_quantize(job)
    text = str(caught.value)
    failing, _, rest = text.partition("It does divide")
    assert "group_size 48" in failing and "64 columns" in failing
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"):
        assert kind in failing
    # The down projections have 96 columns, which 48 divides: they are not blamed.
    assert "down_proj" not in failing and "down_proj (3 modules of 96 columns)" in rest
    assert "Sizes that fit every module: 8, 16, 32;" in rest
    assert_nothing_written(job)


def test_auto_takes_the_largest_size_that_divides_every_module(
    make_job: JobMaker, make_model: Callable[..., Path]
) -> None:
    wide = make_model(hidden_size=128, intermediate_size=256, head_dim=32)
    assert plan_quantize(make_job(group_size="auto")).scheme.group_size == 32
    assert plan_quantize(make_job(group_size="auto", model=wide)).scheme.group_size == 128
    odd = make_model(intermediate_size=72)
    with pytest.raises(Refused, match="No automatic group size"):
        plan_quantize(make_job(group_size="auto", model=odd))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("w4a16-rtn", {"act_order": True}, "act_order"),
        ("w4a16-awq", {"act_order": True}, "act_order"),
        ("none", {"act_order": True}, "act_order"),
        ("none", {"symmetric": False}, "'none'"),
        ("none", {"refine_steps": 5}, "refine is on"),
        ("w8a8-fp8", {"refine_steps": 5}, "refine is on"),
        ("w4a16-gptq", {"refine_steps": 5, "calibration": {"num_samples": 1}}, "at least 2 calibration rows"),
        ("none", {"group_size": 32}, "'none'"),
        ("w4a16-gptq", {"group_size": 4}, "multiple of 8"),
        ("w4a16-gptq", {"group_size": 0}, "multiple of 8"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    name: str, settings: dict[str, object], said: str, make_job: JobMaker
) -> None:
    with pytest.raises(Refused, match=said):
        plan_quantize(make_job(name, **settings))


@pytest.mark.parametrize("field", ["num_samples", "seq_len"])
def test_calibration_counts_must_be_positive(field: str, make_job: JobMaker) -> None:
    with pytest.raises(Refused, match=field):
        make_job(calibration={field: 0})


def test_rows_longer_than_the_model_takes_are_refused(make_job: JobMaker) -> None:
    with pytest.raises(Refused, match="at most 128 tokens"):
        plan_quantize(make_job(calibration={"seq_len": 129}))


def test_empty_calibration_is_refused(make_job: JobMaker, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ten bytes.")
    with pytest.raises(Refused, match="empty"):
        plan_quantize(make_job(calibration={"source": str(tmp_path / "short.txt")}))


def test_only_what_needs_calibration_reads_it(make_job: JobMaker) -> None:
    nowhere = {"source": "/nowhere/at/all.txt"}
    assert plan_quantize(make_job("w4a16-rtn", calibration=nowhere)).windows is None
    for name, settings in (
        ("w4a16-gptq", {}),
        ("w4a16-awq", {}),
        ("w4a16-rtn", {"kv_cache": "fp8"}),
        ("none", {"kv_cache": "fp8"}),
    ):
        with pytest.raises(Refused):
            plan_quantize(make_job(name, calibration=nowhere, **settings))


def test_act_order_is_on_for_gptq_unless_turned_off(make_job: JobMaker) -> None:
    assert plan_quantize(make_job()).scheme.act_order is True
    assert plan_quantize(make_job(act_order=False)).scheme.act_order is False
    assert plan_quantize(make_job("w4a16-awq-gptq")).scheme.act_order is True
    for name in ("w4a16-rtn", "w4a16-awq"):
        assert plan_quantize(make_job(name)).scheme.act_order is False


def test_an_unfinished_run_is_refused_with_the_hint(make_job: JobMaker) -> None:
    job = make_job()
    job.out.with_name("out.partial").mkdir()
    with pytest.raises(Refused, match="--resume"):
        plan_quantize(job)
    plan_quantize(make_job(resume=True))


def test_output_over_the_model_is_refused(make_job: JobMaker, make_model: Callable[..., Path]) -> None:
    model = make_model()
    for out in (model, model.parent):
        with pytest.raises(Refused, match="own directory"):
            plan_quantize(make_job(model=model, out=str(out)))


def test_a_full_disk_is_seen_before(make_job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10, 10, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(Refused, match="GB free"):
        plan_quantize(make_job())


def test_a_quantized_model_is_refused(
    make_job: JobMaker, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in make_model().iterdir():
        text = path.read_bytes()
        if path.name == "config.json":
            text = text.replace(b"{", b'{"quantization_config": {"quant_method": "gptq"},', 1)
        (model / path.name).write_bytes(text)
    with pytest.raises(Refused, match="gptq"):
        plan_quantize(make_job(model=model))


def test_missing_weights_are_refused(
    make_job: JobMaker, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in make_model().iterdir():
        text = path.read_bytes()
        if path.name == "config.json":
            text = text.replace(b'"num_hidden_layers": 3', b'"num_hidden_layers": 4')
        (model / path.name).write_bytes(text)
    with pytest.raises(Refused, match=r"model\.layers\.3"):
        plan_quantize(make_job(model=model))


def test_the_plan_tells_size_memory_and_time(make_job: JobMaker) -> None:
    dense = plan_quantize(make_job("none")).estimate
    packed = plan_quantize(make_job("w4a16-gptq")).estimate
    assert packed.output_bytes < dense.output_bytes
    assert packed.disk_bytes > packed.output_bytes and packed.peak_memory_bytes > 0
    assert packed.seconds is not None and packed.seconds > 0


def test_refinement_is_part_of_the_estimate(make_job: JobMaker) -> None:
    plain, refined = (plan_quantize(make_job(refine_steps=n)).estimate for n in (0, 1000))
    assert refined.seconds is not None and plain.seconds is not None
    assert refined.seconds > 2 * plain.seconds
    assert refined.disk_bytes > plain.disk_bytes and refined.output_bytes == plain.output_bytes


def test_estimated_output_size_is_what_is_written(make_job: JobMaker, reporter: object) -> None:
    from bitsmith.core.progress import Reporter
    from bitsmith.quantize.job import quantize_model

    job = make_job("w4a16-rtn", symmetric=False)
    plan = plan_quantize(job)
    quantize_model(job, plan, Reporter(quiet=True))
    written = (job.out / "model.safetensors").stat().st_size
    header = int.from_bytes((job.out / "model.safetensors").read_bytes()[:8], "little") + 8
    assert written - header == plan.estimate.output_bytes


def test_stage_key_depends_on_what_matters(make_job: JobMaker, tmp_path: Path) -> None:
    key = plan_quantize(make_job()).stage_key
    assert plan_quantize(make_job(out="elsewhere")).stage_key == key
    for changed in (
        {"act_order": False},
        {"refine_steps": 5},
        {"kv_cache": "fp8"},
        {"calibration": {"seed": 1}},
        {"group_size": 16},
    ):
        assert plan_quantize(make_job(**changed)).stage_key != key


def test_scales_are_stored_in_the_type_of_the_weights(
    make_job: JobMaker, make_model: Callable[..., Path]
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert plan_quantize(make_job(model=make_model(dtype=dtype))).scale_dtype == dtype
