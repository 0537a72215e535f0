"""What GPTQ and AWQ checkpoints have in common: modules of qweight, qzeros and scales, inputs first."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.quantize.weight import QuantizedWeight

_PACKED = "qweight"
_SUFFIXES = ("qzeros", "scales", "g_idx")
# Architectures without biases unless their settings say so; the first GPTQ tools wrote zeros all the same.
_BIAS_SETTINGS = {"llama": ("attention_bias", "mlp_bias"), "mistral": ()}


class PackedModules:
    """The packed modules of a checkpoint, by name."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        ending = f".{_PACKED}"
        self.names = tuple(name.removesuffix(ending) for name in reader.names if name.endswith(ending))
        self._names = frozenset(self.names)

    def __contains__(self, module: str) -> bool:
        return module in self._names

    def dense_names(self) -> tuple[str, ...]:
        """State-dict names after dequantization."""
        dense = (self._dense_name(name) for name in self.reader.names)
        return tuple(name for name in dense if name is not None)

    def _dense_name(self, name: str) -> str | None:
        module, _, suffix = name.rpartition(".")
        if suffix == _PACKED:
            return f"{module}.weight"
        if suffix == "bias" and module in self._names and self._is_superfluous(name):
            return None
        return None if suffix in _SUFFIXES and module in self._names else name

    def _is_superfluous(self, bias: str) -> bool:
        """Whether a bias is all zeros in an architecture that has none."""
        settings = _BIAS_SETTINGS.get(str(self.reader.config.get("model_type")))
        has_none = settings is not None and not any(self.reader.config.get(name) for name in settings)
        return has_none and not bool(self.reader.tensor(bias).any())

    def read(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """(qweight, qzeros, scales). Raises Refused where one is missing or of another type."""
        tensors = []
        for suffix in (_PACKED, "qzeros", "scales"):
            name = f"{module}.{suffix}"
            if name not in self.reader:
                raise Refused(f"{self.reader.path}: {module} has no {suffix}; the checkpoint is damaged.")
            tensor = self.reader.tensor(name)
            is_right = tensor.is_floating_point() if suffix == "scales" else tensor.dtype == torch.int32
            if tensor.dim() != 2 or not is_right:
                kind = "floats [num_groups, out]" if suffix == "scales" else "int32 words in two dimensions"
                raise Refused(
                    f"{self.reader.path}: {name} is {tensor.dtype} {list(tensor.shape)}; expected {kind}."
                )
            tensors.append(tensor)
        qweight, qzeros, scales = tensors
        return qweight, qzeros, scales


def declared_group_size(section: Mapping[str, Any], reader: CheckpointReader) -> int | None:
    """None: one group for each output channel, which the formats call -1."""
    size = section.get("group_size")
    if isinstance(size, int) and size == -1:
        return None
    if not isinstance(size, int) or size < 1:
        raise Refused(f"{reader.path} has group_size {size!r}; a positive number or -1 can be read.")
    return size


def check_shapes(module: str, shape: tuple[int, int], zero_point_rows: int, scales: Tensor) -> None:
    """shape: (out, in) by qweight. scales: [num_groups, out]."""
    num_rows, num_columns = shape
    if scales.shape[1] != num_rows or zero_point_rows != num_rows or scales.shape[0] > num_columns:
        raise Refused(
            f"{module}: qweight of [{num_rows}, {num_columns}] weights, qzeros of {zero_point_rows} outputs "
            f"and scales {list(scales.shape)} do not belong together; the checkpoint is damaged or its bits "
            "are not those that it declares."
        )
    if not bool(torch.isfinite(scales).all()):
        raise Refused(f"{module}: a scale is not finite; the checkpoint is damaged.")


def as_weight(
    module: str, values: Tensor, qparams: tuple[Tensor, Tensor], num_bits: int, group_size: int
) -> QuantizedWeight:
    """qparams: scale and zero point, [out, num_groups].

    Where the last group is not full, all are split into smaller ones with the same scales. Zero points that
    are all in the middle of the range are none: the grid is symmetric.
    """
    scale, zero_point = qparams
    num_columns = values.shape[1]
    if scale.shape != zero_point.shape or scale.shape[1] != -(-num_columns // group_size):
        raise Refused(
            f"{module}: scales for {scale.shape[1]} and zero points for {zero_point.shape[1]} groups do not "
            f"belong to {num_columns} columns in groups of {group_size}; the checkpoint is damaged."
        )
    common = math.gcd(num_columns, group_size)
    if common != group_size:
        num_groups = num_columns // common
        scale, zero_point = (
            part.repeat_interleave(group_size // common, dim=1)[:, :num_groups].contiguous()
            for part in (scale, zero_point)
        )
    offset = zero_point if bool(zero_point.any()) else None
    return QuantizedWeight(values.contiguous(), scale, offset, num_bits, common)
