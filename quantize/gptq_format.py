"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: their weights by module name."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader, read_json_object
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale, KVCacheScheme
from bitsmith.quantize.gptq_layout import (
    GPTQ_CONFIG_NAME,
    ZERO_POINTS_LESS_ONE_BITS,
    unpack_values,
    unpack_zero_points,
)
from bitsmith.quantize.gptq_zero_points import ZeroPointSample, choose_label
from bitsmith.quantize.packed_module import PackedModules, as_weight, check_shapes, declared_group_size
from bitsmith.quantize.packing import PACKABLE_BITS, WORD_BITS, num_words
from bitsmith.quantize.reordered_weight import ReorderedWeight
from bitsmith.quantize.weight import QuantizedWeight

_NUM_SAMPLED_MODULES = 4
_SAMPLED_ROWS = 512  # outputs of a module that are looked at for the zero-point convention


def gptq_section(reader: CheckpointReader) -> dict[str, Any] | None:
    """What the checkpoint says of its quantization, in config.json or, in older ones, in a file beside it."""
    inline = reader.config.get("quantization_config")
    if inline is None and (reader.path / GPTQ_CONFIG_NAME).is_file():
        return read_json_object(reader.path, GPTQ_CONFIG_NAME)
    return inline if isinstance(inline, dict) and inline.get("quant_method") == "gptq" else None


class GptqFormat:
    """Reads one module at a time. Raises Refused for a configuration that is not understood."""

    fp8_activations: ActivationScale | None = None
    int8_activations: ActivationScale | None = None
    kv_cache_type: KVCacheScheme = "none"

    def __init__(self, reader: CheckpointReader, *, strict: bool = False) -> None:
        section = gptq_section(reader)
        assert section is not None, reader.path
        self._modules = PackedModules(reader)
        self._num_bits = _declared_bits(section, reader)
        self._group_size = declared_group_size(section, reader)
        declared = _declared_label(section)
        if self._num_bits not in ZERO_POINTS_LESS_ONE_BITS and declared != "gptq_v2":
            raise Refused(
                f"{reader.path} has GPTQ weights of {self._num_bits} bits with checkpoint_format "
                f"{declared!r}: tools differ in how they store zero points less one at this width. gptq_v2 "
                "can be read."
            )
        choice = choose_label(
            declared, self._samples(), self._num_bits, strict=strict, where=str(reader.path)
        )
        self.label = choice.label
        self.notes = (choice.note,) if choice.note else ()

    @property
    def names(self) -> tuple[str, ...]:
        """State-dict names after dequantization."""
        return self._modules.dense_names()

    def quantized(self, module: str) -> QuantizedWeight | ReorderedWeight | None:
        """The weight of a linear module; None where it is stored dense. Raises Refused for a damaged one."""
        if module not in self._modules:
            return None
        qweight, qzeros, scales, groups = self._read(module)
        num_columns = len(groups)
        values = unpack_values(qweight, self._num_bits)
        zero_point = unpack_zero_points(qzeros, self._num_bits, self.label)
        qparams = (scales.T.contiguous(), zero_point)
        group_size = self._group_size or num_columns
        if torch.equal(groups, torch.arange(num_columns) // group_size):
            return as_weight(module, values, qparams, self._num_bits, group_size)
        columns = torch.argsort(groups, stable=True)
        group_size = _equal_group_size(module, groups)
        return ReorderedWeight(
            as_weight(module, values[:, columns], qparams, self._num_bits, group_size), columns
        )

    def kv_scales(self, layer_index: int) -> tuple[float, float] | None:
        return None

    def _read(self, module: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(qweight, qzeros, scales, group of each column), found to belong together."""
        qweight, qzeros, scales = self._modules.read(module)
        num_columns, num_rows = qweight.shape[0] * WORD_BITS // self._num_bits, qweight.shape[1]
        check_shapes(module, (num_rows, num_columns), qzeros.shape[1] * WORD_BITS // self._num_bits, scales)
        if qzeros.shape[0] != scales.shape[0]:
            raise Refused(
                f"{module}: qzeros {list(qzeros.shape)} and scales {list(scales.shape)} do not have the same "
                "groups; the checkpoint is damaged."
            )
        return qweight, qzeros, scales, self._groups(module, num_columns, scales.shape[0])

    def _groups(self, module: str, num_columns: int, num_groups: int) -> Tensor:
        """[in] int64: the group of each column."""
        name = f"{module}.g_idx"
        group_size = self._group_size or num_columns
        groups = torch.arange(num_columns) // group_size
        stored = self._modules.reader.tensor(name).long() if name in self._modules.reader else groups
        # GPTQModel's kernels without act-order fill g_idx with zeros and do not read it.
        if stored.shape == groups.shape and bool((stored == 0).all()):
            stored = groups
        if stored.shape != groups.shape or int(stored.min()) < 0 or int(stored.max()) >= num_groups:
            raise Refused(
                f"{module}: g_idx {list(stored.shape)} does not name one of {num_groups} groups for each of "
                f"{num_columns} columns; the checkpoint is damaged."
            )
        return stored

    def _samples(self) -> Iterator[ZeroPointSample]:
        """Pieces of a few modules, spread over the model."""
        modules = self._modules.names
        step = max(1, len(modules) // _NUM_SAMPLED_MODULES)
        for module in modules[::step][:_NUM_SAMPLED_MODULES]:
            qweight, qzeros, _, groups = self._read(module)
            num_rows = min(_SAMPLED_ROWS, qweight.shape[1])
            words = num_words(num_rows, self._num_bits)
            yield ZeroPointSample(qweight[:, :num_rows], qzeros[:, :words], groups)


def _declared_bits(section: Mapping[str, Any], reader: CheckpointReader) -> int:
    num_bits = section.get("bits")
    if num_bits not in PACKABLE_BITS:
        raise Refused(
            f"{reader.path} has GPTQ weights of {num_bits} bits; {', '.join(map(str, PACKABLE_BITS))} can "
            "be read."
        )
    overrides = [name for name in section.get("dynamic") or {} if not name.startswith("-:")]
    if overrides:
        raise Refused(
            f"{reader.path} has settings of their own for some modules (`dynamic`: {overrides[0]!r}); "
            "checkpoints whose modules are quantized alike can be read."
        )
    return int(num_bits)


def _declared_label(section: Mapping[str, Any]) -> str | None:
    label = section.get("checkpoint_format") or section.get("format")
    return None if label is None else str(label)


def _equal_group_size(module: str, groups: Tensor) -> int:
    smallest, largest = (int(end) for end in torch.bincount(groups).aminmax())
    if smallest != largest:
        raise Refused(
            f"{module}: g_idx gives groups of {smallest} to {largest} columns; groups of one size can be "
            "read. Quantize the model again with static groups."
        )
    return smallest
