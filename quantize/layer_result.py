"""What one decoder layer has come to so far; grows as its stages are done."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitsmith.core.manifest import Fallback
from bitsmith.quantize.compressed_tensors import kv_scale_names, store_weight
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.layer_method import PreparedLayer
from bitsmith.quantize.layer_refiner import RefinedLayer
from bitsmith.quantize.records import LayerReport, ModuleRecord, RefineRecord, refined_record
from bitsmith.quantize.stage_quantizer import QuantizedStage
from bitsmith.quantize.weight import QuantizedWeight, tensor_sha256


@dataclass(slots=True)
class LayerResult:
    """prefix: the layer's name. prepared: what was done to it before. weights: by full module name."""

    prefix: str
    prepared: PreparedLayer
    weights: dict[str, QuantizedWeight | Int8Weight | Fp8Weight] = field(default_factory=dict)
    records: list[ModuleRecord] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    kv_scales: tuple[float, float] | None = None
    refine: RefineRecord | None = None

    def __post_init__(self) -> None:
        self.fallbacks += self.prepared.fallbacks

    def add(self, quantized: QuantizedStage) -> None:
        self.weights |= quantized.weights
        self.records += [self.prepared.with_smoothing(record) for record in quantized.records]
        self.fallbacks += quantized.fallbacks

    def add_refined(self, refined: RefinedLayer, originals: Mapping[str, Tensor]) -> None:
        """originals: module name in the layer -> unquantized weight."""
        self.refine = refined.record
        if not refined.record.kept:
            return
        for position, record in enumerate(self.records):
            name = record.name.removeprefix(f"{self.prefix}.")
            self.weights[record.name] = refined.weights[name]
            self.records[position] = refined_record(record, originals[name], refined.weights[name])

    def add_kv_scales(self, scales: tuple[float, float] | None) -> None:
        """(key, value); None: there was nothing to choose them from."""
        if scales is None:
            reason = "calibration put nothing but zeros into this layer's cache"
            where = f"{self.prefix}.self_attn"
            self.fallbacks.append(Fallback(where, "calibrated KV scales", "scale 1", reason))
        self.kv_scales = scales or (1.0, 1.0)

    def rounded(self) -> dict[str, QuantizedWeight]:
        """Module name in the layer -> weight, of those that lie on an integer grid."""
        return {
            name.removeprefix(f"{self.prefix}."): weight
            for name, weight in self.weights.items()
            if isinstance(weight, QuantizedWeight)
        }

    def tensors(self) -> dict[str, Tensor]:
        """By the names that the checkpoint's format gives them."""
        tensors = dict(self.prepared.changed)
        for name, weight in self.weights.items():
            tensors |= store_weight(name, weight)
        if self.kv_scales is not None:
            names = kv_scale_names(self.prefix)
            tensors |= {n: torch.tensor([s]) for n, s in zip(names, self.kv_scales, strict=True)}
        return tensors

    def report(self) -> LayerReport:
        changed = {name: tensor_sha256(tensor) for name, tensor in self.prepared.changed.items()}
        return LayerReport(self.records, self.fallbacks, self.kv_scales, self.refine, changed)
