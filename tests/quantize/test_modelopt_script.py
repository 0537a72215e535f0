"""The script that runs beside ModelOpt, with a double in ModelOpt's place."""

import hashlib
import importlib.metadata
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bitsmith.quantize import modelopt_backend

SCRIPT = Path(modelopt_backend.__file__).with_name("modelopt_script.py")
FP8 = {
    "quant_cfg": [{"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": (4, 3)}}],
    "algorithm": "max",
}
KV = {"quant_cfg": [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3)}}]}
AWQ = {
    "quant_cfg": [
        {
            "quantizer_name": "*weight_quantizer",
            "cfg": {"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}},
        },
        {"quantizer_name": "*input_quantizer", "enable": False},
        {"quantizer_name": "*proj*", "cfg": [{"block_sizes": {-1: 128}}, {"block_sizes": {-1: None}}]},
    ],
    "algorithm": {"method": "awq_lite"},
}


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_configuration_has_all_presets_over_everything_switched_off(script: dict[str, Any]) -> None:
    config = script["make_config"]([FP8, KV], None)
    assert config["algorithm"] == "max"
    assert config["quant_cfg"] == [
        {"quantizer_name": "*", "enable": False},
        *FP8["quant_cfg"],
        *KV["quant_cfg"],
    ]
    assert script["make_config"]([KV], None)["algorithm"] == "max"


def test_the_group_size_is_set_where_there_are_groups(script: dict[str, Any]) -> None:
    config = script["make_config"]([AWQ], 64)
    weights, _, sequence = config["quant_cfg"][1:]
    assert weights["cfg"]["block_sizes"] == {-1: 64, "type": "static"}
    assert sequence["cfg"] == [{"block_sizes": {-1: 64}}, {"block_sizes": {-1: None}}]
    assert config["algorithm"] == {"method": "awq_lite"}
    assert script["make_config"]([AWQ], None)["quant_cfg"][1:] == AWQ["quant_cfg"], "the preset was changed"


@pytest.mark.parametrize("has_tokens", [True, False])
def test_it_calibrates_on_the_given_tokens_and_says_which(
    has_tokens: bool,
    script: dict[str, Any],
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_ids = torch.randint(0, 250, (5, 16), generator=torch.Generator().manual_seed(0))
    save_file({"token_ids": token_ids}, tmp_path / "tokens.safetensors")
    seen: dict[str, Any] = {"rows": []}

    def quantize(model: Any, config: dict[str, Any], calibrate: Callable[[Any], None] | None) -> None:
        seen["config"] = config
        assert next(model.parameters()).dtype == torch.float32 and not model.training
        if calibrate is not None:
            calibrate(lambda rows, **options: seen["rows"].append(model(rows, **options) and rows))

    def export(model: Any, dtype: torch.dtype, export_dir: str) -> None:
        seen["export"] = (dtype, export_dir)

    quantization, exporter = ModuleType("modelopt.torch.quantization"), ModuleType("modelopt.torch.export")
    vars(quantization).update(quantize=quantize, FP8_DEFAULT_CFG=FP8, FP8_KV_CFG=KV)
    vars(exporter).update(export_hf_checkpoint=export)
    for module in (ModuleType("modelopt"), ModuleType("modelopt.torch"), quantization, exporter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules["modelopt.torch"]).update(quantization=quantization, export=exporter)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1")
    request = {
        "model": str(make_model()),
        "tokens": str(tmp_path / "tokens.safetensors") if has_tokens else None,
        "presets": ["FP8_DEFAULT_CFG", "FP8_KV_CFG"],
        "group_size": None,
        "rows_per_batch": 2,
        "out": str(tmp_path / "export"),
        "result": str(tmp_path / "result.json"),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    script["main"](str(tmp_path / "request.json"))

    assert len(seen["config"]["quant_cfg"]) == 3
    assert [len(rows) for rows in seen["rows"]] == ([2, 2, 1] if has_tokens else [])
    assert not has_tokens or torch.equal(torch.cat(seen["rows"]), token_ids)
    assert seen["export"] == (torch.float32, request["out"])
    result = json.loads((tmp_path / "result.json").read_text())
    digest = hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()
    assert result["token_digest"] == (digest if has_tokens else None)
    assert result["versions"]["nvidia-modelopt"] == "nvidia-modelopt 1" and result["seconds"] >= 0


def test_it_ends_when_its_caller_is_gone() -> None:
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r})['end_with_caller']()"
    process = subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.stdin.close()
    assert process.wait(timeout=30) == 1
