"""What a quantization method has to say for the layer-by-layer driver to carry it out.

A method first prepares a whole layer without changing what it computes, then quantizes it stage by stage.
Not known here: any method.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bitsmith.core.manifest import Fallback
from bitsmith.quantize.layer_stages import Stage
from bitsmith.quantize.previous_operator import LayerProbe
from bitsmith.quantize.records import ModuleRecord
from bitsmith.quantize.stage_quantizer import QuantizedStage


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A layer on the table. prefix: its name. stages: empty where the method reads no inputs.

    hidden_states, keywords: by batch, as the layer is called. probe: a call with a few tokens; None where
    the method reads no inputs.
    stored_dtype: of a parameter in the checkpoint, by its name in the layer.
    """

    prefix: str
    layer: nn.Module
    stages: Sequence[Stage]
    hidden_states: Sequence[Tensor]
    keywords: Sequence[Mapping[str, Any]]
    probe: LayerProbe | None
    stored_dtype: Callable[[str], torch.dtype]

    def weight(self, name: str) -> Tensor:
        """[out, in] of a linear module, by its name in the layer; changed in place."""
        return self.layer.get_parameter(f"{name}.weight").data


@dataclass(frozen=True, slots=True)
class Smoothing:
    """The scales that one module's columns were multiplied with, and where they were divided out."""

    alpha: float
    folded_into: str


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """What preparation came to. changed: tensors that replace the source's, by full name, as stored.
    smoothing: by full module name, of the modules that have it."""

    changed: Mapping[str, Tensor] = field(default_factory=dict)
    smoothing: Mapping[str, Smoothing] = field(default_factory=dict)
    fallbacks: Sequence[Fallback] = ()

    def with_smoothing(self, record: ModuleRecord) -> ModuleRecord:
        found = self.smoothing.get(record.name)
        if found is None:
            return record
        return dataclasses.replace(record, alpha=found.alpha, folded_into=found.folded_into)


class LayerPreparation(Protocol):
    """Changes a layer's parameters, but not the function that it computes."""

    def prepare(self, work: LayerWork) -> PreparedLayer: ...


class StageMethod(Protocol):
    """Quantizes modules that read one input. weights: full module name -> [out, in] fp32."""

    @property
    def reads_inputs(self) -> bool:
        """Whether it needs calibration tokens."""

    def quantize(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> QuantizedStage:
        """inputs: by batch, [tokens, in] fp32; what the layer so far computes for the calibration tokens."""

    def quantize_unseen(self, weights: Mapping[str, Tensor]) -> QuantizedStage:
        """One module for which there are no inputs."""


class NothingToPrepare:
    """For methods that take the layer as it is."""

    def prepare(self, work: LayerWork) -> PreparedLayer:
        return PreparedLayer()


@dataclass(frozen=True, slots=True)
class LayerMethod:
    preparation: LayerPreparation
    stage: StageMethod
