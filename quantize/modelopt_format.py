"""ModelOpt's unified Hugging Face checkpoints: their weights and KV scales by module name.

Names and layout are those that nvidia-modelopt 0.47 writes. Not known here: what TensorRT-LLM makes of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale, KVCacheScheme
from bitsmith.quantize.compressed_float import load_fp8
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int4_rows import unpack_rows
from bitsmith.quantize.modelopt_config import modelopt_kv_scales, modelopt_section
from bitsmith.quantize.smoothed_weight import SmoothedWeight
from bitsmith.quantize.weight import QuantizedWeight

Quantized = QuantizedWeight | SmoothedWeight | Fp8Weight

_FP8_INPUTS: dict[str, ActivationScale] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "token"}
_INT8_ALGOS = ("W8A16", "W8A8_SQ_PER_CHANNEL")
_INT4_ALGOS = ("W4A16_AWQ", "W4A8_AWQ")
_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale")


class ModelOptFormat:
    """Reads one module at a time; a module without a scale is dense."""

    notes: tuple[str, ...] = ()

    def __init__(self, reader: CheckpointReader) -> None:
        section = modelopt_section(reader)
        assert section is not None, reader.path
        self._reader = reader
        self._algo = section.get("quant_algo")
        known = (*_FP8_INPUTS, *_INT8_ALGOS, *_INT4_ALGOS)
        if self._algo not in (None, *known):
            raise Refused(f"{reader.path} has quant_algo {self._algo!r}; {', '.join(known)} can be read.")
        kv_algo = section.get("kv_cache_quant_algo")
        if kv_algo not in (None, "FP8"):
            raise Refused(f"{reader.path} has a KV cache of type {kv_algo!r}; FP8 can be read.")
        self.kv_cache_type: KVCacheScheme = "none" if kv_algo is None else "fp8"
        self.fp8_activations = _FP8_INPUTS.get(str(self._algo))
        self.int8_activations: ActivationScale | None = None  # its INT8 modules scale their inputs first

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict names after dequantization."""
        return tuple(name for name in self._reader.names if name.rpartition(".")[2] not in _SUFFIXES)

    def quantized(self, module: str) -> Quantized | None:
        """The weight of a linear module; None where it is stored dense. Raises Refused for a damaged one."""
        if f"{module}.weight_scale" not in self._reader:
            return None
        if self.fp8_activations is not None:
            return load_fp8(module, self._reader.tensor, self.fp8_activations)
        read = self._read_int8 if self._algo in _INT8_ALGOS else self._read_int4
        weight = self._checked(module, read)
        name = f"{module}.pre_quant_scale"
        if name not in self._reader:
            return weight
        pre_quant_scale = self._reader.tensor(name)
        if pre_quant_scale.shape != (weight.in_features,) or not bool(torch.isfinite(pre_quant_scale).all()):
            raise Refused(
                f"{name} {list(pre_quant_scale.shape)} must hold {weight.in_features} finite numbers."
            )
        return SmoothedWeight(weight, pre_quant_scale)

    def kv_scales(self, layer_index: int) -> tuple[float, float] | None:
        """(key scale, value scale): stored = real / scale. None: not in the checkpoint."""
        return modelopt_kv_scales(self._reader, layer_index)

    def _checked(self, module: str, read: Callable[[str], tuple[Tensor, Tensor, int]]) -> QuantizedWeight:
        values, scale, num_bits = read(module)
        num_rows, num_columns = values.shape
        if scale.dim() != 2 or scale.shape[0] != num_rows or num_columns % scale.shape[1]:
            raise Refused(
                f"{module}: weight_scale {list(scale.shape)} does not belong to weight {list(values.shape)}."
            )
        if not bool(torch.isfinite(scale).all()):
            raise Refused(f"{module}: a scale is not finite; the checkpoint is damaged.")
        return QuantizedWeight(values, scale, None, num_bits, num_columns // scale.shape[1])

    def _read_int8(self, module: str) -> tuple[Tensor, Tensor, int]:
        """values [out, in] int8, scale [out] -> [out, 1]."""
        values = self._stored(module, torch.int8)
        return values, self._reader.tensor(f"{module}.weight_scale").float().reshape(-1, 1), 8

    def _read_int4(self, module: str) -> tuple[Tensor, Tensor, int]:
        """Two rows in a byte: [out / 2, in] -> [out, in]; scale [out, num_groups]."""
        values = unpack_rows(self._stored(module, torch.uint8))
        return values, self._reader.tensor(f"{module}.weight_scale").float(), 4

    def _stored(self, module: str, dtype: torch.dtype) -> Tensor:
        stored = self._reader.tensor(f"{module}.weight")
        if stored.dtype != dtype or stored.dim() != 2:
            raise Refused(
                f"{module}.weight is {stored.dtype} {list(stored.shape)}; {self._algo} has {dtype} [out, in]."
            )
        return stored
