"""What ModelOpt exported becomes the files of an artifact, and is read back before it counts.

Weights and scales stay as they are. What is dense is stored in the source's own types: ModelOpt computed in
fp32, and exports so.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.quantize.checkpoint_output import MAX_SHARD_BYTES, write_json
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.modelopt_config import QUANT_CONFIG_NAME, modelopt_section
from bitsmith.quantize.modelopt_presets import expected_algo
from bitsmith.quantize.plan import QuantizePlan
from bitsmith.quantize.records import LayerReport, ModuleRecord, is_finite, weight_sqnr_db
from bitsmith.quantize.reordered_weight import ReorderedWeight
from bitsmith.quantize.smoothed_weight import SmoothedWeight
from bitsmith.quantize.weight import tensor_sha256
from bitsmith.quantize.weight_source import WeightSource

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def adopt_export(
    exported: Path, source: CheckpointReader, plan: QuantizePlan, target: Path, seconds: float
) -> list[LayerReport]:
    """Write weights and configuration to `target`; a report for each layer. seconds: what ModelOpt took.

    Raises WorkFailed where the export is not what was planned.
    """
    try:
        reader = CheckpointReader(exported)
        section = modelopt_section(reader)
    except Refused as error:
        raise WorkFailed(f"ModelOpt's export cannot be read: {error}") from error
    found = (section or {}).get("quant_algo"), (section or {}).get("kv_cache_quant_algo")
    planned = expected_algo(plan.scheme), "FP8" if plan.scheme.kv_cache == "fp8" else None
    if section is None or found != planned:
        raise WorkFailed(f"ModelOpt exported quantization {found}; {planned} was planned.")
    writer = CheckpointWriter(target, max_shard_bytes=MAX_SHARD_BYTES)
    for name, tensor in _tensors(reader, source, plan):
        writer.add(name, tensor)
    writer.finish()
    shutil.copyfile(exported / QUANT_CONFIG_NAME, target / QUANT_CONFIG_NAME)
    body = source.config | {"quantization_config": reader.config["quantization_config"]}
    write_json(body, target / "config.json")
    return _reports(WeightSource(CheckpointReader(target)), source, plan, seconds)


def _tensors(
    exported: CheckpointReader, source: CheckpointReader, plan: QuantizePlan
) -> Iterator[tuple[str, Tensor]]:
    """What is written, by name; weights and scales as they are, all else in the source's type."""
    replaced = {f"{module}.weight" for module in plan.selection.shapes}
    weights = set(WeightSource(exported).names)
    gained = sorted(weights - set(source.names) - {_HEAD})
    if gained:
        raise WorkFailed(f"ModelOpt's export holds {gained[0]!r}, which the model has not.")
    for name in exported.names:
        if name == _HEAD and name not in source:  # the embedding once more
            continue
        tensor = exported.tensor(name)
        if not is_finite(tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor):
            raise WorkFailed(f"ModelOpt's export: tensor {name!r} holds NaN or infinity.")
        if name.endswith(".pre_quant_scale"):
            tensor = tensor.to(plan.scale_dtype)
        elif name in source and name not in replaced:
            tensor = tensor.to(source.dtype(name))
        yield name, tensor


def _reports(
    written: WeightSource, source: CheckpointReader, plan: QuantizePlan, seconds: float
) -> list[LayerReport]:
    lost = sorted(set(source.names) - set(written.names) - _tied_head(source))
    if lost:
        raise WorkFailed(f"ModelOpt's export lacks {len(lost)} weights of the model, first {lost[0]!r}.")
    for kept in plan.selection.unquantized:
        if f"{kept.name}.weight" in written and not isinstance(written.linear(kept.name), Tensor):
            raise WorkFailed(f"ModelOpt quantized {kept.name!r}, which was to stay as it is.")
    share = seconds / max(1, len(plan.selection.shapes))
    records: dict[int, list[ModuleRecord]] = {}
    for module in plan.selection.shapes:
        layer = int(module.partition(".layers.")[2].partition(".")[0])
        record = _record(module, written, source, is_smoothed=plan.scheme.moves_scales)
        records.setdefault(layer, []).append(replace(record, seconds=share))
    num_layers = int((source.config.get("text_config") or source.config)["num_hidden_layers"])
    return [
        LayerReport(
            records.get(layer, []),
            [],
            _kv_scales(written, layer, plan),
            changed=_changed(written, source, f".layers.{layer}.", plan),
        )
        for layer in range(num_layers)
    ]


def _tied_head(source: CheckpointReader) -> set[str]:
    """The head, where a source stores the embedding a second time: ModelOpt keeps one of them."""
    if _HEAD not in source or _EMBEDDING not in source:
        return set()
    return {_HEAD} if torch.equal(source.tensor(_HEAD), source.tensor(_EMBEDDING)) else set()


def _record(
    module: str, written: WeightSource, source: CheckpointReader, *, is_smoothed: bool
) -> ModuleRecord:
    """Smoothing moves scales between weights and norms, so that weights alone say nothing of its noise."""
    weight = written.linear(module)
    if isinstance(weight, Tensor | ReorderedWeight):  # its format has no reordered ones
        raise WorkFailed(f"ModelOpt left {module!r} as it was; it was to be quantized.")
    original, real = source.tensor(f"{module}.weight").float(), weight.dequantize()
    if real.shape != original.shape:
        raise WorkFailed(f"ModelOpt's {module} is {list(real.shape)}, the model's {list(original.shape)}.")
    stored = weight.weight if isinstance(weight, SmoothedWeight) else weight
    num_bits, group_size = (
        (8, stored.in_features)
        if isinstance(stored, Fp8Weight | Int8Weight)
        else (stored.num_bits, stored.group_size)
    )
    return ModuleRecord(
        name=module,
        method="modelopt",
        num_bits=num_bits,
        group_size=group_size,
        relative_error=None,
        sqnr_db=None if is_smoothed else weight_sqnr_db(original, real),
        damping=None,
        seconds=0.0,
        dequantized_sha256=tensor_sha256(real),
    )


def _changed(
    written: WeightSource, source: CheckpointReader, layer: str, plan: QuantizePlan
) -> dict[str, str]:
    """SHA-256 of a layer's tensors that stay dense and differ all the same, as norms that took a scale in."""
    dense = [n for n in source.names if layer in n and n.removesuffix(".weight") not in plan.selection.shapes]
    pairs = {name: written.tensor(name) for name in dense}
    return {n: tensor_sha256(t) for n, t in pairs.items() if not torch.equal(t, source.tensor(n))}


def _kv_scales(written: WeightSource, layer: int, plan: QuantizePlan) -> tuple[float, float] | None:
    if plan.scheme.kv_cache == "none":
        return None
    scales = written.kv_scales(layer)
    if scales is None or not all(0.0 < scale < math.inf for scale in scales):
        raise WorkFailed(f"ModelOpt's export has KV scales {scales} in layer {layer}.")
    return scales
