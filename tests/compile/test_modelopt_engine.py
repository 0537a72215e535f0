"""ModelOpt's unified checkpoints as native engines: FP8 and INT8 weights run, scaled inputs are refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bitsmith.compile.engine import Engine
from bitsmith.compile.job import CompileJob, plan_compile
from bitsmith.compile.parity import measure_parity
from bitsmith.core.errors import Refused
from bitsmith.quantize.weight_source import open_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
EngineMaker = Callable[..., Engine]
ModelMaker = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path, make_model: ModelMaker) -> Callable[[str], Path]:
    """checkpoint(golden) -> a copy with a tokenizer beside it."""

    def make(name: str) -> Path:
        path = tmp_path / name
        shutil.copytree(GOLDEN / f"mo_hf_llama_{name}", path)
        for file in make_model("llama").glob("tokenizer*"):
            shutil.copy(file, path)
        return path

    return make


@pytest.mark.parametrize("name", ["fp8_kvfp8", "fp8pcpt", "int8wo"])
def test_in_fp32_it_is_the_dequantized_model(
    name: str, checkpoint: Callable[[str], Path], eager_engine: EngineMaker
) -> None:
    path = checkpoint(name)
    record = measure_parity(eager_engine(path), open_weights(path))
    assert 0 < record.decisive < 1e-4


def test_fp8_arithmetic_is_taken_over(checkpoint: Callable[[str], Path], eager_engine: EngineMaker) -> None:
    engine = eager_engine(checkpoint("fp8_kvfp8"), activations="auto", kv_cache="auto")
    expected = "fp8 weights, bf16 head, fp8 (static scales) activations, fp8 KV cache, calibrated scales"
    assert engine.arithmetic == expected


@pytest.mark.parametrize("name", ["int4awq_kvfp8", "w4a8awq", "int8sq"])
def test_weights_whose_inputs_are_scaled_first_are_refused_by_name(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=r"o_proj has a pre_quant_scale .*--target tensorrt-llm"):
        plan_compile(CompileJob(checkpoint(name), tmp_path / "engine"))
