"""FP8 and INT8 compressed-tensors checkpoints: exported as the ModelOpt checkpoint of the same numbers is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitsmith.compile.tensorrt_export import CheckpointExport
from bitsmith.compile.tensorrt_plan import ExportSettings, plan_export
from bitsmith.compile.tensorrt_source import open_source
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def args(kind: str, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic}


FORMS = {
    "fp8_kvfp8": ("float-quantized", args("float", "tensor"), args("float", "tensor")),
    "fp8pcpt": ("float-quantized", args("float", "channel"), args("float", "token", dynamic=True)),
}


def compressed(golden: str, path: Path, form: str, weights: dict[str, Any], inputs: dict[str, Any]) -> Path:
    """The golden's tensors under compressed-tensors' names."""
    path.mkdir()
    renamed = {}
    for name, tensor in load_file(GOLDEN / f"mo_hf_llama_{golden}" / "model.safetensors").items():
        name = name.replace("k_proj.k_scale", "k_scale").replace("v_proj.v_scale", "v_scale")
        is_row_scale = name.endswith("weight_scale") and tensor.dim() == 1
        renamed[name] = (tensor.unsqueeze(1) if is_row_scale else tensor).clone()
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((GOLDEN / f"mo_hf_llama_{golden}" / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": KV,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def exported(source: Path, path: Path) -> dict[str, torch.Tensor]:
    path.mkdir()
    opened = open_source(source)
    CheckpointExport(opened, plan_export(opened, ExportSettings())).write(path, Reporter(quiet=True))
    return load_file(path / "rank0.safetensors")


@pytest.mark.parametrize("golden", FORMS)
def test_same_numbers_give_the_same_checkpoint(golden: str, tmp_path: Path) -> None:
    source = compressed(golden, tmp_path / "source", *FORMS[golden])
    ours = exported(source, tmp_path / "ours")
    theirs = exported(GOLDEN / f"mo_hf_llama_{golden}", tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        (args("float", "channel"), args("float", "tensor")),
        (args("float", "tensor"), args("float", "token", dynamic=True)),
        (args("int", "channel"), args("int", "token", dynamic=True)),
        (args("float", "block"), args("float", "group", dynamic=True)),
    ],
)
def test_forms_without_a_mode_are_refused(
    weights: dict[str, Any], inputs: dict[str, Any], tmp_path: Path
) -> None:
    source = compressed("fp8_kvfp8", tmp_path / "source", "float-quantized", weights, inputs)
    with pytest.raises(Refused, match="have no TensorRT-LLM mode here"):
        open_source(source)


def test_other_methods_are_refused(tmp_path: Path) -> None:
    source = compressed("fp8_kvfp8", tmp_path / "source", *FORMS["fp8_kvfp8"])
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="quantized with 'hqq'"):
        open_source(source)
