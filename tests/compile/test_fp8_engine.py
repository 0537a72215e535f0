"""Checkpoints with FP8 weights as native engines: the arithmetic that the checkpoint declares."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bitsmith.compile.batch import RequestStep, build_model_input
from bitsmith.compile.engine import Engine
from bitsmith.compile.job import CompileJob, plan_compile
from bitsmith.compile.parity import measure_parity, parity_limit
from bitsmith.core.errors import Refused
from bitsmith.quantize.weight_source import open_weights

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]
FP8_SCHEMES = ("w8a8-fp8", "w8a8-fp8-dynamic")


@pytest.mark.parametrize("name", FP8_SCHEMES)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_in_fp32_it_is_the_dequantized_model(
    name: str, model_type: str, make_fp8: ModelMaker, eager_engine: EngineMaker
) -> None:
    checkpoint = make_fp8(name, model_type)
    record = measure_parity(eager_engine(checkpoint), open_weights(checkpoint))
    assert (record.limit.metric, record.limit.limit) == ("max_relative", 1e-4)
    assert 0 < record.decisive < 1e-4


@pytest.mark.parametrize("name", FP8_SCHEMES)
def test_auto_rounds_inputs_as_compressed_tensors_does(
    name: str, make_fp8: ModelMaker, eager_engine: EngineMaker
) -> None:
    checkpoint = make_fp8(name)
    engine = eager_engine(checkpoint, activations="auto")
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    windows = torch.randint(0, 301, (24, 4), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(windows).logits
    steps = [RequestStep(window, 0, [i], 4) for i, window in enumerate(windows.tolist())]
    model_input = build_model_input(steps)
    actual, plain = (
        model.execute(model_input, model.new_kv_cache(24)).view(24, 4, -1)
        for model in (engine, eager_engine(checkpoint))
    )
    # An input at a rounding boundary may take the other side, which changes all that follows: seldom. Else
    # only the order of summation differs, and the head, which takes bf16 inputs here.
    differences = (actual - expected).flatten(1).norm(dim=1)
    assert float(differences.median()) < 0.05 * float((plain - expected).flatten(1).norm(dim=1).median())


@pytest.mark.parametrize(
    ("name", "text"),
    [("w8a8-fp8", "fp8 (static scales)"), ("w8a8-fp8-dynamic", "fp8 (a scale for each token)")],
)
def test_bytes_stay_bytes_rows_are_fused_and_the_arithmetic_is_named(
    name: str, text: str, make_fp8: ModelMaker, eager_engine: EngineMaker
) -> None:
    engine = eager_engine(make_fp8(name), activations="auto", kv_cache="auto")
    assert engine.arithmetic == f"fp8 weights, bf16 head, {text} activations, fp8 KV cache, calibrated scales"
    qkv = engine.plan.linears["layers.0.qkv"]
    assert len(qkv) == 1 and qkv[0].is_fp8 and qkv[0].activations == "fp8"
    assert (qkv[0].input_scale is None) == (name == "w8a8-fp8-dynamic")
    assert engine.plan.linears["head"][0].activations == "bf16"
    assert (
        parity_limit(engine.plan).metric == "kl_mean"
        and "fp8 activations" in parity_limit(engine.plan).reason
    )


def test_activations_that_do_not_fit_are_refused(
    make_fp8: ModelMaker, make_model: ModelMaker, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="int8 needs integer weights"):
        plan_compile(CompileJob(make_fp8("w8a8-fp8"), tmp_path / "engine", activations="int8"))
    with pytest.raises(Refused, match="fp8 needs FP8 weights"):
        plan_compile(CompileJob(make_model("llama"), tmp_path / "engine", activations="fp8"))
