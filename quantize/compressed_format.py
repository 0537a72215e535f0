"""Compressed-tensors checkpoints, and dense ones: their weights and KV scales by module name."""

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.scheme import ActivationScale, KVCacheScheme
from bitsmith.quantize.compressed_float import FLOAT_QUANTIZED, load_fp8
from bitsmith.quantize.compressed_int import INT_QUANTIZED, load_int8
from bitsmith.quantize.compressed_tensors import (
    declared_bits,
    declared_kv_cache,
    dense_name,
    is_packed,
    kv_scale_names,
    unpack_weight,
)
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.weight import QuantizedWeight


class CompressedTensorsFormat:
    """Reads one module at a time. Raises Refused for a configuration that is not understood."""

    notes: tuple[str, ...] = ()

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._bits = declared_bits(reader.config)
        self.fp8_activations: ActivationScale | None = FLOAT_QUANTIZED.declared(reader.config)
        self.int8_activations: ActivationScale | None = INT_QUANTIZED.declared(reader.config)
        self.kv_cache_type: KVCacheScheme = declared_kv_cache(reader.config)

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict names after dequantization."""
        dense = (dense_name(name) for name in self._reader.names)
        return tuple(name for name in dense if name is not None)

    def quantized(self, module: str) -> QuantizedWeight | Int8Weight | Fp8Weight | None:
        """The weight of a linear module; None where it is stored dense."""
        if is_packed(module, self._reader.names):
            bits = self._bits.of(module)
            return unpack_weight(module, self._reader.tensor, lambda name: name in self._reader, bits)
        if f"{module}.weight_scale" not in self._reader:
            return None
        if self.fp8_activations is not None:
            return load_fp8(module, self._reader.tensor, self.fp8_activations)
        if self.int8_activations is not None:
            return load_int8(module, self._reader.tensor, self.int8_activations)
        return None

    def kv_scales(self, layer_index: int) -> tuple[float, float] | None:
        """(key scale, value scale): stored = real / scale. None: not in the checkpoint."""
        names = kv_scale_names(f"model.layers.{layer_index}")
        if any(name not in self._reader for name in names):
            return None
        key_scale, value_scale = (float(self._reader.tensor(name)) for name in names)
        return key_scale, value_scale
