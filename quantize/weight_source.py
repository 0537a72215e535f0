"""Weights by module name, from a quantized checkpoint or from a dense model directory alike."""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.compressed_float import declared_fp8, load_fp8
from bitsmith.quantize.compressed_tensors import (
    declared_bits,
    declared_kv_cache,
    dense_name,
    is_packed,
    kv_scale_names,
    unpack_weight,
)
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.weight import QuantizedWeight


class WeightSource:
    """Reads one tensor at a time; holds none."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._bits = declared_bits(reader.config)
        self.fp8_activations: ActivationScale | None = declared_fp8(reader.config)
        self.kv_cache_type: Literal["none", "fp8"] = declared_kv_cache(reader.config)
        dense = (dense_name(name) for name in reader.names)
        self.names: tuple[str, ...] = tuple(name for name in dense if name is not None)
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

    def linear(self, module_name: str) -> QuantizedWeight | Fp8Weight | Tensor:
        """The weight of a linear module: quantized if the checkpoint has it so, else as stored, [out, in]."""
        if is_packed(module_name, self._reader.names):
            return unpack_weight(
                module_name, self._reader.tensor, lambda name: name in self._reader, self._bits
            )
        if self.fp8_activations is not None and f"{module_name}.weight_scale" in self._reader:
            return load_fp8(module_name, self.tensor, self.fp8_activations)
        return self.tensor(f"{module_name}.weight")

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
        names = kv_scale_names(f"model.layers.{layer_index}")
        if any(name not in self._reader for name in names):
            return None
        key_scale, value_scale = (float(self._reader.tensor(name)) for name in names)
        return key_scale, value_scale


def open_weights(path: Path) -> WeightSource:
    """Weights of a quantized checkpoint or of a dense model directory."""
    return WeightSource(CheckpointReader(path))
