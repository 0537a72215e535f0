"""Checkpoints with packed integer weights, written without a quantize job."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.quantize.checkpoint_output import copy_side_files, write_settings
from bitsmith.quantize.packed_format import FormatName, GridSettings, packed_format
from bitsmith.quantize.qparams import Grid, choose_qparams, quantize
from bitsmith.quantize.weight import QuantizedWeight

Weights = dict[str, QuantizedWeight]


def rounded_weights(model: Path, *, symmetric: bool, group_size: int = 32, num_bits: int = 4) -> Weights:
    """Every linear module of the decoder layers, rounded to nearest, with fp16 scales."""
    reader = CheckpointReader(model)
    grid = Grid(num_bits, group_size, symmetric, torch.float16)
    modules = [name.removesuffix(".weight") for name in reader.names if "_proj.weight" in name]
    tensors = {module: reader.tensor(f"{module}.weight").float() for module in modules}
    return {name: quantize(tensor, choose_qparams(tensor, grid), grid) for name, tensor in tensors.items()}


def write_packed(path: Path, model: Path, weights: Mapping[str, QuantizedWeight], form: FormatName) -> Path:
    """The model with these modules packed."""
    reader = CheckpointReader(model)
    path.mkdir()
    copy_side_files(model, path)
    output = packed_format(form)
    first = next(iter(weights.values()))
    symmetric = all(weight.is_symmetric for weight in weights.values())
    write_settings(reader.config, path, output, GridSettings(first.num_bits, first.group_size, symmetric))
    dense = [name for name in reader.names if name.removesuffix(".weight") not in weights]
    tensors = {name: reader.tensor(name) for name in dense}
    for module, weight in weights.items():
        tensors |= output.store(module, weight)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def change_settings(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """`quantization_config` of a checkpoint, changed in place; the file that repeats it is removed."""
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    (path / "quantize_config.json").unlink(missing_ok=True)


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def with_zero_points(weight: QuantizedWeight, shift: torch.Tensor) -> QuantizedWeight:
    """The same real weights but for clipping: integers and zero points moved by shift, [out]."""
    assert weight.zero_point is None
    low, high = -(1 << (weight.num_bits - 1)), (1 << (weight.num_bits - 1)) - 1
    values = (weight.values + shift[:, None]).clamp(low, high).to(torch.int8)
    zero_point = shift[:, None].expand(weight.scale.shape).to(torch.int8).contiguous()
    return replace(weight, values=values, zero_point=zero_point)
