"""Files of a quantized checkpoint: side files byte for byte, config.json, weights shard by shard."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.manifest import MANIFEST_NAME
from bitsmith.core.model_files import resolve_inside
from bitsmith.core.model_ref import CONVERSION_NAME
from bitsmith.quantize.compressed_float import fp8_input_args, fp8_weight_args
from bitsmith.quantize.compressed_int import int8_input_args, int8_weight_args
from bitsmith.quantize.compressed_tensors import quantization_config, weight_args
from bitsmith.quantize.resume_state import ResumeState

if TYPE_CHECKING:
    from bitsmith.quantize.plan import QuantizePlan

_MAX_SHARD_BYTES = 1 << 30
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
_REPLACED = ("config.json", MANIFEST_NAME, CONVERSION_NAME)


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


def write_config(config: dict[str, Any], target: Path, plan: "QuantizePlan") -> None:
    """The source's config.json, with `quantization_config` where anything is quantized."""
    scheme = plan.scheme
    body = dict(config)
    if scheme.method is not None or scheme.kv_cache != "none":
        group_size = scheme.group_size if isinstance(scheme.group_size, int) else None
        weights = inputs = None
        if scheme.activation_scale is not None and scheme.method == "smoothquant":
            weights, inputs = int8_weight_args(), int8_input_args(scheme.activation_scale)
        elif scheme.activation_scale is not None:
            weights = fp8_weight_args(scheme.activation_scale)
            inputs = fp8_input_args(scheme.activation_scale)
        elif scheme.method is not None:
            weights = weight_args(scheme.num_bits, group_size, scheme.symmetric, scheme.act_order is True)
        # The head is a linear module by class; it must be named even where it is tied and not stored.
        body["quantization_config"] = quantization_config(weights, ["lm_head"], scheme.kv_cache, inputs)
    (target / "config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def write_weights(reader: CheckpointReader, state: ResumeState, target: Path, plan: "QuantizePlan") -> None:
    """What is kept, as stored in the source; then every layer's packed and changed tensors and KV scales."""
    replaced = {f"{name}.weight" for name in plan.selection.shapes} | state.tensor_names()
    writer = CheckpointWriter(target, max_shard_bytes=_MAX_SHARD_BYTES)
    for name in reader.names:
        if name not in replaced:
            writer.add(name, reader.tensor(name))
    for index in range(state.num_finished()):
        for name, tensor in sorted(state.load_tensors(index).items()):
            writer.add(name, tensor)
    writer.finish()
