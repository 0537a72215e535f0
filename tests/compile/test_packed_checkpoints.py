"""GPTQ and AWQ checkpoints as native engines and as sources of TensorRT-LLM exports."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitsmith.compile.engine import Engine
from bitsmith.compile.job import CompileJob, plan_compile
from bitsmith.compile.parity import measure_parity
from bitsmith.compile.tensorrt_linear import Int4Linear, WeightOnlyLinear
from bitsmith.compile.tensorrt_source import open_source
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import ModelSource
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme, parse_scheme_name
from bitsmith.quantize import job as job_module
from bitsmith.quantize.budget import Budget
from bitsmith.quantize.calibration import CalibrationSettings
from bitsmith.quantize.job import QuantizeJob, plan_quantize, quantize_model
from bitsmith.quantize.packed_format import FormatName
from bitsmith.quantize.weight_source import open_weights

EngineMaker = Callable[..., Engine]
ModelMaker = Callable[..., Path]
CheckpointMaker = Callable[..., Path]
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def checkpoint(tmp_path: Path, make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch) -> CheckpointMaker:
    """checkpoint(format, scheme name, symmetric=...) -> what `quantize` writes."""
    monkeypatch.setattr(job_module, "reread_in_fresh_process", lambda checkpoint, records: None)

    def make(
        form: FormatName, name: str = "w4a16-rtn", *, symmetric: bool = True, budget: Budget | None = None
    ) -> Path:
        num_bits, method = parse_scheme_name(name)
        scheme = QuantizationScheme(name, num_bits, method, group_size=32, symmetric=symmetric)
        model = ModelSource("tiny", make_model("llama", dtype=torch.bfloat16))
        job = QuantizeJob(
            model, scheme, CalibrationSettings("builtin", 4, 32), tmp_path / form, format=form, budget=budget
        )
        quantize_model(job, plan_quantize(job), Reporter(quiet=True))
        return job.out

    return make


@pytest.mark.parametrize(("form", "symmetric"), [("gptq", True), ("gptq_v2", False), ("awq", False)])
def test_in_fp32_an_engine_is_the_dequantized_model(
    form: FormatName, symmetric: bool, checkpoint: CheckpointMaker, eager_engine: EngineMaker
) -> None:
    path = checkpoint(form, symmetric=symmetric)
    engine = eager_engine(path)
    assert "int4 weights (group 32)" in engine.arithmetic
    record = measure_parity(engine, open_weights(path))
    assert 0 < record.decisive < 1e-4


@pytest.mark.parametrize(
    ("form", "name", "symmetric"),
    [
        ("compressed-tensors", "w2a16-rtn", False),
        ("compressed-tensors", "w3a16-rtn", True),
        ("gptq_v2", "w3a16-rtn", False),
    ],
)
@pytest.mark.parametrize("activations", ["fp32", "int8"])
def test_two_and_three_bits_are_packed_as_four_and_lose_nothing(
    form: FormatName,
    name: str,
    symmetric: bool,
    activations: str,
    checkpoint: CheckpointMaker,
    eager_engine: EngineMaker,
) -> None:
    path = checkpoint(form, name, symmetric=symmetric)
    engine = eager_engine(path, activations=activations)
    assert f"int4 weights (group 32, {name[1]} bits packed as 4)" in engine.arithmetic
    record = measure_parity(engine, open_weights(path))
    assert 0 < record.decisive < (1e-4 if activations == "fp32" else 0.1)


def test_a_mixed_checkpoint_is_one_product_for_modules_that_share_an_input(
    checkpoint: CheckpointMaker, eager_engine: EngineMaker
) -> None:
    path = checkpoint("compressed-tensors", budget=Budget(bits=4.2))
    engine = eager_engine(path)
    assert "3 bits packed as 4" in engine.arithmetic
    products = [specs for name, specs in engine.plan.linears.items() if name != "head"]
    assert all(len(specs) == 1 for specs in products)
    assert len({(spec.num_bits, spec.checkpoint_bits) for (spec,) in products}) > 1
    assert 0 < measure_parity(engine, open_weights(path)).decisive < 1e-4


def test_a_mixed_checkpoint_is_not_exported_to_tensorrt_llm(checkpoint: CheckpointMaker) -> None:
    path = checkpoint("compressed-tensors", budget=Budget(bits=4.2))
    with pytest.raises(Refused, match="quantizes its modules in several ways"):
        open_source(path)


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq_v2"])
def test_two_and_three_bits_are_not_exported(form: FormatName, checkpoint: CheckpointMaker) -> None:
    path = checkpoint(form, "w3a16-rtn")
    with pytest.raises(Refused, match=r"3.bit|3 bits.*4 and 8"):
        open_source(path)


def test_a_wrong_label_is_a_warning_of_the_plan(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    path = checkpoint("gptq")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (path / "config.json").write_text(json.dumps(config))
    (path / "manifest.json").unlink()
    plan = plan_compile(CompileJob(path, tmp_path / "engine"))
    assert any("is labelled 'gptq_v2', but its values are those of 'gptq'" in text for text in plan.warnings)


def reorder(path: Path) -> None:
    """Every module's columns in another order, as act-order without static groups leaves them."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path / "model.safetensors")
    (path / "manifest.json").unlink()


def test_groups_of_scattered_columns_are_refused_by_name(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    path = checkpoint("gptq")
    reorder(path)
    with pytest.raises(Refused, match=r"o_proj has groups of columns that are not neighbours \(g_idx"):
        plan_compile(CompileJob(path, tmp_path / "engine"))
    with pytest.raises(Refused, match=r"not neighbours \(g_idx\), which are not exported"):
        open_source(path)


@pytest.mark.parametrize(
    ("form", "name", "symmetric", "kind", "algo"),
    [
        ("gptq", "w4a16-rtn", True, Int4Linear, "W4A16_AWQ"),
        ("awq", "w4a16-rtn", False, Int4Linear, "W4A16_AWQ"),
        ("gptq_v2", "w8a16-rtn", True, WeightOnlyLinear, "W8A16"),
    ],
)
def test_an_export_reads_the_same_weights(
    form: FormatName, name: str, symmetric: bool, kind: type, algo: str, checkpoint: CheckpointMaker
) -> None:
    path = checkpoint(form, name, symmetric=symmetric)
    source, weights = open_source(path), open_weights(path)
    assert source.scheme.quant_algo == algo
    assert source.scheme.is_symmetric == symmetric
    linear = source.linear(QUERY)
    assert isinstance(linear, kind)
    assert source.is_quantized(QUERY) and not source.is_quantized("model.embed_tokens")
    assert torch.equal(linear.dequantize(), weights.dequantized(f"{QUERY}.weight"))
    assert source.kv_scales(0) is None
    assert "model.norm.weight" in source


def test_negative_scales_are_not_exported(checkpoint: CheckpointMaker) -> None:
    path = checkpoint("awq")
    tensors = load_file(path / "model.safetensors")
    tensors[f"{QUERY}.scales"][0, 0] *= -1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(Refused, match=f"{QUERY} has negative scales.*--for tensorrt-llm"):
        open_source(path)
