"""Files of a quantized checkpoint: side files byte for byte, config.json, weights shard by shard."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.manifest import MANIFEST_NAME
from bitsmith.core.model_files import resolve_inside
from bitsmith.core.model_ref import CONVERSION_NAME
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.bit_choice import BitChoice
from bitsmith.quantize.compressed_float import FLOAT_QUANTIZED, fp8_weight_args
from bitsmith.quantize.compressed_int import INT_QUANTIZED, int8_weight_args
from bitsmith.quantize.compressed_tensors import (
    PACKED_SUFFIXES,
    WeightGroup,
    grouped_config,
    is_packed,
    quantization_config,
    unpack_weight,
    weight_args,
)
from bitsmith.quantize.gptq_layout import GPTQ_CONFIG_NAME
from bitsmith.quantize.packed_format import GridSettings, PackedFormat, grid_settings, packed_format
from bitsmith.quantize.plan import QuantizePlan
from bitsmith.quantize.resume_state import ResumeState

MAX_SHARD_BYTES = 1 << 30
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".pkl",
)
# Written anew, or describing the source's own files.
_REPLACED = ("config.json", GPTQ_CONFIG_NAME, MANIFEST_NAME, CONVERSION_NAME)


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, chat template, generation config and all else that is not weights.

    Names of what was left behind: folders, weights in other formats, code (it would never be run).
    """
    left = []
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.name in _REPLACED or path.suffix == ".safetensors" or path.name.startswith("."):
            continue
        if path.is_dir() or is_weights or path.suffix == ".py":
            if not path.name.endswith(".safetensors.index.json"):
                left.append(path.name)
            continue
        shutil.copyfile(resolve_inside(source, path.name), target / path.name)
    return left


def write_config(
    config: Mapping[str, Any], target: Path, plan: QuantizePlan, choices: Mapping[str, BitChoice]
) -> None:
    """The source's config.json, with `quantization_config` where anything is quantized. choices: of a bit
    plan, by module; empty without one."""
    if plan.format != "compressed-tensors":
        write_settings(config, target, packed_format(plan.format), grid_settings(plan.scheme))
        return
    scheme = plan.scheme
    body = dict(config)
    if choices:
        groups = _weight_groups(scheme, choices)
        body["quantization_config"] = grouped_config(groups, ["lm_head"], scheme.kv_cache)
    elif scheme.method is not None or scheme.kv_cache != "none":
        weights = inputs = None
        if scheme.activation_scale is not None and scheme.method == "smoothquant":
            weights, inputs = int8_weight_args(), INT_QUANTIZED.input_args(scheme.activation_scale)
        elif scheme.activation_scale is not None:
            weights = fp8_weight_args(scheme.activation_scale)
            inputs = FLOAT_QUANTIZED.input_args(scheme.activation_scale)
        elif scheme.method is not None:
            grid = grid_settings(scheme)
            weights = weight_args(grid.num_bits, grid.group_size, grid.symmetric, grid.act_order)
        # The head is a linear module by class; it must be named even where it is tied and not stored.
        body["quantization_config"] = quantization_config(weights, ["lm_head"], scheme.kv_cache, inputs)
    write_json(body, target / "config.json")


def _weight_groups(scheme: QuantizationScheme, choices: Mapping[str, BitChoice]) -> list[WeightGroup]:
    """Modules by their names: those of one choice are one group."""
    groups = []
    for choice in sorted(set(choices.values())):
        names = [module for module, taken in choices.items() if taken == choice]
        grid = grid_settings(replace(scheme, num_bits=choice.num_bits, group_size=choice.group_size))
        args = weight_args(grid.num_bits, grid.group_size, grid.symmetric, grid.act_order)
        groups.append(WeightGroup(names, args))
    return groups


def write_settings(config: Mapping[str, Any], target: Path, form: PackedFormat, grid: GridSettings) -> None:
    """config.json of a checkpoint whose weights are integers, and the file that repeats its settings."""
    settings = form.settings(grid)
    write_json({**config, "quantization_config": settings}, target / "config.json")
    if form.settings_file is not None:
        write_json(settings, target / form.settings_file)


def write_json(body: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def write_weights(reader: CheckpointReader, state: ResumeState, target: Path, plan: QuantizePlan) -> None:
    """What is kept, as stored in the source; then every layer's packed and changed tensors and KV scales."""
    replaced = {f"{name}.weight" for name in plan.selection.shapes} | state.tensor_names()
    writer = CheckpointWriter(target, max_shard_bytes=MAX_SHARD_BYTES)
    for name in reader.names:
        if name not in replaced:
            writer.add(name, reader.tensor(name))
    for index in range(state.num_finished()):
        for name, tensor in sorted(_in_format(state.load_tensors(index), plan).items()):
            writer.add(name, tensor)
    writer.finish()


def _in_format(tensors: Mapping[str, Tensor], plan: QuantizePlan) -> Mapping[str, Tensor]:
    """A layer's tensors as the plan's format has them; finished layers are kept as compressed-tensors."""
    if plan.format == "compressed-tensors":
        return tensors
    form = packed_format(plan.format)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            weight = unpack_weight(module, tensors.__getitem__, tensors.__contains__, (plan.scheme.num_bits,))
            result |= form.store(module, weight)
        elif suffix not in PACKED_SUFFIXES or not is_packed(module, tensors):
            result[name] = tensor
    return result
