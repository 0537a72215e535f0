"""`quantize` into GPTQ and AWQ checkpoints: the files, their settings, and what is refused before work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.core.progress import Reporter
from bitsmith.quantize.gptq_layout import pack_gptq
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import open_weights

JobMaker = Callable[..., QuantizeJob]
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "scheme", "settings"),
    [
        ("gptq", "w4a16-gptq", {}),
        ("gptq", "w8a16-rtn", {"group_size": "channel"}),
        ("gptq", "w2a16-gptq", {}),
        ("gptq_v2", "w3a16-gptq", {"symmetric": False}),
        ("gptq_v2", "w2a16-awq-gptq", {"symmetric": False}),
        ("gptq_v2", "w4a16-awq-gptq", {"symmetric": False}),
        ("awq", "w4a16-awq", {"symmetric": False}),
        ("awq", "w4a16-gptq", {}),
    ],
)
def test_the_checkpoint_holds_what_compressed_tensors_would_with_scales_in_fp16(
    form: str, scheme: str, settings: dict[str, Any], make_job: JobMaker, reporter: Reporter
) -> None:
    job = make_job(scheme, format=form, **settings)
    plan = plan_quantize(job)
    assert plan.scale_dtype == torch.float16 and plan.config["format"] == form
    quantize_model(job, plan, reporter)
    source = open_weights(job.out, strict=True)
    original = open_weights(job.model.path)
    assert set(source.names) == set(original.names)
    manifest = read_manifest(job.out)
    for record in manifest.details["modules"]:
        weight = source.linear(record["name"])
        assert isinstance(weight, QuantizedWeight) and weight.scale.dtype == torch.float16
        assert (weight.num_bits, weight.group_size) == (record["num_bits"], record["group_size"])
        assert weight.is_symmetric == settings.get("symmetric", True)
        assert record["sqnr_db"] > {2: 3, 3: 7}.get(record["num_bits"], 10)
    written = json.loads((job.out / "config.json").read_text())["quantization_config"]
    assert written["group_size"] == (-1 if settings.get("group_size") == "channel" else 32)
    assert (job.out / "quantize_config.json").exists() == form.startswith("gptq")
    if form == "awq":
        expected = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    else:
        expected = {"quant_method": "gptq", "desc_act": False, "checkpoint_format": form}
    assert expected.items() <= written.items()


def test_columns_in_another_order_keep_their_groups(make_job: JobMaker, reporter: Reporter) -> None:
    """Act-order with static groups: the file's groups are runs of columns, and so readers need no g_idx."""
    job = make_job("w4a16-gptq", format="gptq", act_order=True)
    quantize_model(job, plan_quantize(job), reporter)
    source = open_weights(job.out)
    weight = source.linear(QUERY)
    assert isinstance(weight, QuantizedWeight)
    assert pack_gptq(weight, "gptq")["g_idx"].tolist() == [column // 32 for column in range(64)]


@pytest.mark.parametrize(
    ("form", "scheme", "settings", "named"),
    [
        ("gptq", "w4a16-gptq", {"symmetric": False}, "GPTQModel refuses such files"),
        ("gptq", "w3a16-gptq", {}, "at 3 bits its readers.*Use gptq_v2"),
        ("awq", "w8a16-rtn", {}, "4-bit weights only"),
        ("awq", "w3a16-awq", {}, "4-bit weights only"),
        ("awq", "w8a8-fp8-dynamic", {}, "integer weights with unquantized inputs"),
        ("gptq", "w8a8-int8", {}, "integer weights with unquantized inputs"),
        ("gptq", "none", {"kv_cache": "fp8"}, "integer weights with unquantized inputs"),
        ("gptq_v2", "w4a16-gptq", {"kv_cache": "fp8"}, "no place for KV-cache scales"),
        ("exl2", "w4a16-gptq", {}, "Valid formats: compressed-tensors, gptq, gptq_v2, awq"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_work(
    form: str, scheme: str, settings: dict[str, Any], named: str, make_job: JobMaker
) -> None:
    job = make_job(scheme, format=form, **settings)
    with pytest.raises(Refused, match=named):
        plan_quantize(job)
    assert not job.out.exists() and not job.out.with_name("out.partial").exists()


def test_sizes_that_do_not_fill_words_are_refused_by_name(
    make_model: Callable[..., Path], make_job: JobMaker
) -> None:
    odd = make_model("llama", intermediate_size=100)
    for form, what in (("awq", "100 outputs"), ("gptq", "100 outputs")):
        with pytest.raises(
            Refused, match=f"mlp.gate_proj: its {what} do not fill 32-bit words: no multiple of 8"
        ):
            plan_quantize(make_job("w4a16-rtn", model=odd, format=form, group_size="channel"))
