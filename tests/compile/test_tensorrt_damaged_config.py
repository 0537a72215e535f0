"""The validator answers for any configuration, however damaged: a report, never a crash."""

import json
from pathlib import Path
from typing import Any

import pytest

from bitsmith.compile.tensorrt_check import check_engine_checkpoint
from bitsmith.compile.tensorrt_check_quant import check_quantization
from bitsmith.compile.tensorrt_config import read_model
from bitsmith.compile.tensorrt_layout import checkpoint_tensors
from bitsmith.compile.tensorrt_release import parse_release
from bitsmith.compile.tensorrt_unified_check import check_section, check_unified_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
ODD: list[Any] = [None, "odd", -1, 0, 1.5, True, [], [1], {}, {"odd": 1}, "\ud800", 10**30]


def places(body: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(body, dict):
        return []
    keys = [(*prefix, key) for key in body]
    return keys + [place for key in body for place in places(body[key], (*prefix, key))]


def replaced(body: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(body))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@pytest.mark.parametrize("golden", ["mo_trt_llama_int4awq_kvfp8", "mo_trt_qwen3_fp8_kvfp8"])
def test_engine_configuration(golden: str) -> None:
    """What is read from a configuration either names the tensors of every rank, or is a finding."""
    release = parse_release("1.2.1")
    body = json.loads((GOLDEN / golden / "config.json").read_text())
    for place in places(body):
        for value in ODD:
            damaged = replaced(body, place, value)
            model, findings = read_model(damaged, release)
            if model is None:
                assert findings, (place, value)
                continue
            quantization = list(check_quantization(model, damaged, release))
            if not any(finding.code == "quant-algo" for finding in quantization):
                assert checkpoint_tensors(model, 0, release), (place, value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"architecture": "LlamaForCausalLM"}'])
def test_file_that_is_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert not check_engine_checkpoint(tmp_path, parse_release("1.2.1")).is_accepted
    assert not check_unified_checkpoint(tmp_path, parse_release("1.2.1")).is_accepted


def test_unified_configuration() -> None:
    body = json.loads((GOLDEN / "mo_hf_llama_w4a8awq" / "hf_quant_config.json").read_text())["quantization"]
    for key in body:
        for value in ODD:
            assert list(check_section(body | {key: value})) is not None, (key, value)
