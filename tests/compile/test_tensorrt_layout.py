"""The layout tables against the parameter lists that TensorRT-LLM 0.14's own Python enumerates."""

import json
from pathlib import Path
from typing import Any

import pytest

from bitsmith.compile.tensorrt_config import read_model
from bitsmith.compile.tensorrt_engine_layout import engine_parameters
from bitsmith.compile.tensorrt_release import parse_release

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
TABLES: dict[str, Any] = json.loads((GOLDEN / "trtllm_0.14_parameters.json").read_text())
QUANTIZED_EMBEDDING = "llama__W8A16_excl_lmhead"  # what the check refuses instead of laying out


@pytest.mark.parametrize("name", [name for name in TABLES if name != QUANTIZED_EMBEDDING])
def test_engine_parameters_equal_those_of_tensorrt_llm(name: str) -> None:
    release = parse_release("0.14")
    model, findings = read_model(TABLES[name]["config"], release)
    assert model is not None, findings
    ours = {
        key: ["fp8" if dtype == "float8_e4m3fn" else dtype, list(shape)]
        for key, (dtype, shape) in engine_parameters(model, 0, release).items()
    }
    assert ours == TABLES[name]["parameters"]


def test_every_family_and_mode_is_compared() -> None:
    families = {name.split("__")[0] for name in TABLES}
    modes = {name.split("__")[1] for name in TABLES}
    assert families == {"llama", "mistral", "qwen2", "gemma2"}
    assert len(modes) >= 23
