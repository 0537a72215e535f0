"""Weights by module name, from a quantized checkpoint of any format or from a dense model alike."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale, KVCacheScheme
from bitsmith.quantize.awq_format import AwqFormat
from bitsmith.quantize.compressed_format import CompressedTensorsFormat
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.gptq_format import GptqFormat, gptq_section
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.modelopt_config import modelopt_section
from bitsmith.quantize.modelopt_format import ModelOptFormat
from bitsmith.quantize.reordered_weight import ReorderedWeight
from bitsmith.quantize.smoothed_weight import SmoothedWeight
from bitsmith.quantize.weight import QuantizedWeight

StoredWeight = QuantizedWeight | ReorderedWeight | Int8Weight | SmoothedWeight | Fp8Weight


class StoredFormat(Protocol):
    """How quantized weights lie in a checkpoint's files."""

    @property
    def fp8_activations(self) -> ActivationScale | None: ...

    @property
    def int8_activations(self) -> ActivationScale | None: ...

    @property
    def kv_cache_type(self) -> KVCacheScheme: ...

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict names after dequantization."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the checkpoint was read, in sentences."""
        ...

    def quantized(self, module: str) -> StoredWeight | None:
        """The weight of a linear module; None where it is stored dense."""
        ...

    def kv_scales(self, layer_index: int) -> tuple[float, float] | None: ...


class WeightSource:
    """Reads one tensor at a time; holds none. strict: what a GPTQ file's values do not confirm is refused."""

    def __init__(self, reader: CheckpointReader, *, strict: bool = False) -> None:
        self._reader = reader
        self._format = _stored_format(reader, strict=strict)
        self.notes = self._format.notes
        self.fp8_activations = self._format.fp8_activations
        self.int8_activations = self._format.int8_activations
        self.kv_cache_type = self._format.kv_cache_type
        self.names = self._format.names
        self._name_set = frozenset(self.names)

    @property
    def path(self) -> Path:
        return self._reader.path

    @property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        return self._reader.config

    def __contains__(self, name: str) -> bool:
        """Whether there is a weight of this state-dict name after dequantization."""
        return name in self._name_set

    def linear(self, module_name: str) -> StoredWeight | Tensor:
        """The weight of a linear module: quantized if the checkpoint has it so, else as stored, [out, in]."""
        weight = self._format.quantized(module_name)
        return self.tensor(f"{module_name}.weight") if weight is None else weight

    def tensor(self, name: str) -> Tensor:
        """A tensor that is stored as it is: norms, embeddings, biases, dense weights."""
        if name not in self._reader:
            raise Refused(f"{self.path} has no tensor {name!r}.")
        return self._reader.tensor(name)

    def dequantized(self, name: str) -> Tensor:
        """A weight by its state-dict name: fp32 if it was quantized, else as stored."""
        weight = self.linear(name.removesuffix(".weight")) if name.endswith(".weight") else self.tensor(name)
        return weight if isinstance(weight, Tensor) else weight.dequantize()

    def kv_scales(self, layer_index: int) -> tuple[float, float] | None:
        """(key scale, value scale) of a layer's cache: stored = real / scale. None: not in the checkpoint."""
        return self._format.kv_scales(layer_index)


def _stored_format(reader: CheckpointReader, *, strict: bool) -> StoredFormat:
    if modelopt_section(reader) is not None:
        return ModelOptFormat(reader)
    if gptq_section(reader) is not None:
        return GptqFormat(reader, strict=strict)
    if (reader.config.get("quantization_config") or {}).get("quant_method") == "awq":
        return AwqFormat(reader)
    return CompressedTensorsFormat(reader)


def open_weights(path: Path, *, strict: bool = False) -> WeightSource:
    """Weights of a quantized checkpoint or of a dense model directory."""
    return WeightSource(CheckpointReader(path), strict=strict)
