"""AWQ checkpoints of the `gemm` kind, as AutoAWQ and GPTQModel write them: their weights by module name."""

from collections.abc import Mapping
from typing import Any

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale, KVCacheScheme
from bitsmith.quantize.awq_layout import AWQ_BITS, unpack_awq
from bitsmith.quantize.packed_module import PackedModules, as_weight, check_shapes, declared_group_size
from bitsmith.quantize.packing import WORD_BITS
from bitsmith.quantize.weight import QuantizedWeight

_KIND = "gemm"


class AwqFormat:
    """Reads one module at a time. Raises Refused for a configuration that is not understood."""

    fp8_activations: ActivationScale | None = None
    int8_activations: ActivationScale | None = None
    kv_cache_type: KVCacheScheme = "none"
    notes: tuple[str, ...] = ()

    def __init__(self, reader: CheckpointReader) -> None:
        section = reader.config["quantization_config"]
        _check(section, reader)
        self._modules = PackedModules(reader)
        self._group_size = declared_group_size(section, reader)

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict names after dequantization."""
        return self._modules.dense_names()

    def quantized(self, module: str) -> QuantizedWeight | None:
        """The weight of a linear module; None where it is stored dense. Raises Refused for a damaged one."""
        if module not in self._modules:
            return None
        qweight, qzeros, scales = self._modules.read(module)
        per_word = WORD_BITS // AWQ_BITS
        num_columns, num_rows = qweight.shape[0], qweight.shape[1] * per_word
        check_shapes(module, (num_rows, num_columns), qzeros.shape[1] * per_word, scales)
        qparams = (scales.T.contiguous(), unpack_awq(qzeros))
        return as_weight(module, unpack_awq(qweight), qparams, AWQ_BITS, self._group_size or num_columns)

    def kv_scales(self, layer_index: int) -> tuple[float, float] | None:
        return None


def _check(section: Mapping[str, Any], reader: CheckpointReader) -> None:
    kind = str(section.get("version") or section.get("format") or _KIND).lower()
    if kind != _KIND:
        raise Refused(f"{reader.path} is an AWQ checkpoint of kind {kind!r}; {_KIND!r} can be read.")
    if section.get("bits") != AWQ_BITS:
        raise Refused(f"{reader.path} has AWQ weights of {section.get('bits')} bits; {AWQ_BITS} can be read.")
