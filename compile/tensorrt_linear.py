"""One linear layer's weight on its way to TensorRT-LLM: dense, FP8, INT8 or INT4 with its scales.

Each kind can be cut along rows and columns (for tensor parallelism), joined along rows (for fused layers)
and turned back to what the matrix product computes. Real weights are [out, in]. Nothing here knows names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """weight: [out, in] in a floating-point dtype."""

    weight: Tensor

    def dequantize(self) -> Tensor:
        return self.weight.float()

    def rows(self, index: Tensor) -> "DenseLinear":
        return DenseLinear(self.weight[index])

    def columns(self, start: int, stop: int) -> "DenseLinear":
        return DenseLinear(self.weight[:, start:stop])


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """real = weight * scale. weight: [out, in] float8_e4m3fn.

    scale: fp32, [1] for the tensor or [out] for each row. input_scale: fp32 [1], or None where activations
    are scaled for each token at run time.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None

    @property
    def is_rowwise(self) -> bool:
        return self.input_scale is None

    def dequantize(self) -> Tensor:
        return self.weight.float() * self.scale.unsqueeze(1)

    def rows(self, index: Tensor) -> "Fp8Linear":
        scale = self.scale[index] if self.is_rowwise else self.scale
        return replace(
            self, weight=self.weight.view(torch.uint8)[index].view(torch.float8_e4m3fn), scale=scale
        )

    def columns(self, start: int, stop: int) -> "Fp8Linear":
        return replace(self, weight=self.weight[:, start:stop])


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """real = values * scale[out] * pre_quant_scale[in]; inputs are multiplied by pre_quant_scale first.

    values: [out, in] int8. scale: [out] fp32. input_scale: fp32 [1].
    """

    values: Tensor
    scale: Tensor
    input_scale: Tensor
    pre_quant_scale: Tensor

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scale.unsqueeze(1) * self.pre_quant_scale.float()

    def rows(self, index: Tensor) -> "Int8Linear":
        return replace(self, values=self.values[index], scale=self.scale[index])

    def columns(self, start: int, stop: int) -> "Int8Linear":
        scale = self.pre_quant_scale[start:stop]
        return replace(self, values=self.values[:, start:stop], pre_quant_scale=scale)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """real = (values - zero_point) * scale, times pre_quant_scale[in] where there is one.

    values: [out, in] int8 in [-8, 7]. scale: [out, num_groups]. zero_point: [out, num_groups] or None; int8,
    or fp32 when it was read back from a file that holds zero_point * scale rounded.
    pre_quant_scale: [in] or None. input_scale, weight_scale_2: fp32 [1], only for FP8 activations.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    pre_quant_scale: Tensor | None = None
    input_scale: Tensor | None = None
    weight_scale_2: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Tensor:
        # [out, in] -> [out, num_groups, group_size]
        grouped = self.values.reshape(-1, self.scale.shape[1], self.group_size).float()
        if self.zero_point is not None:
            grouped = grouped - self.zero_point.float().unsqueeze(2)
        real: Tensor = (grouped * self.scale.float().unsqueeze(2)).flatten(1)
        return real if self.pre_quant_scale is None else real * self.pre_quant_scale.float()

    def rows(self, index: Tensor) -> "Int4Linear":
        zero_point = None if self.zero_point is None else self.zero_point[index]
        return replace(self, values=self.values[index], scale=self.scale[index], zero_point=zero_point)

    def columns(self, start: int, stop: int) -> "Int4Linear":
        """Columns of whole groups; a cut inside a group has no scale of its own."""
        size = self.group_size
        assert start % size == 0 and stop % size == 0, (start, stop, size)
        groups = slice(start // size, stop // size)
        zero_point = None if self.zero_point is None else self.zero_point[:, groups]
        pre_quant = None if self.pre_quant_scale is None else self.pre_quant_scale[start:stop]
        values, scale = self.values[:, start:stop], self.scale[:, groups]
        return replace(self, values=values, scale=scale, zero_point=zero_point, pre_quant_scale=pre_quant)


@dataclass(frozen=True, slots=True)
class WeightOnlyLinear:
    """Eight-bit weights with dense activations; engines round such weights themselves when they are built.

    values: [out, in] int8. scale: [out, num_groups]. zero_point: [out, num_groups] int8 or None.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None

    @property
    def is_per_channel(self) -> bool:
        """One scale for each row and no zero points: what the PyTorch backend reads."""
        return self.scale.shape[1] == 1 and self.zero_point is None

    def dequantize(self) -> Tensor:
        return Int4Linear(self.values, self.scale, self.zero_point).dequantize()


Linear = DenseLinear | Fp8Linear | Int8Linear | Int4Linear
SourceLinear = Linear | WeightOnlyLinear


def out_features(linear: Linear) -> int:
    return _stored(linear).shape[0]


def in_features(linear: Linear) -> int:
    return _stored(linear).shape[1]


def _stored(linear: Linear) -> Tensor:
    return linear.weight if isinstance(linear, DenseLinear | Fp8Linear) else linear.values


def join_rows(parts: Sequence[Linear]) -> Linear:
    """One linear whose rows are those of all parts in order.

    The parts are of one kind, and what they share (per-tensor scales, pre-quant scales) is already equal:
    tensorrt_fuse.py makes it so.
    """
    first = parts[0]
    assert all(type(part) is type(first) for part in parts), [type(part).__name__ for part in parts]
    if isinstance(first, DenseLinear):
        return DenseLinear(torch.cat([cast(DenseLinear, part).weight for part in parts]))
    if isinstance(first, Fp8Linear):
        fp8 = [cast(Fp8Linear, part) for part in parts]
        weight = torch.cat([part.weight.view(torch.uint8) for part in fp8]).view(torch.float8_e4m3fn)
        scale = torch.cat([part.scale for part in fp8]) if first.is_rowwise else first.scale
        return replace(first, weight=weight, scale=scale)
    if isinstance(first, Int8Linear):
        int8 = [cast(Int8Linear, part) for part in parts]
        values, scale = torch.cat([p.values for p in int8]), torch.cat([p.scale for p in int8])
        return replace(first, values=values, scale=scale)
    int4 = [cast(Int4Linear, part) for part in parts]
    zero_points = [part.zero_point for part in int4 if part.zero_point is not None]
    return replace(
        first,
        values=torch.cat([part.values for part in int4]),
        scale=torch.cat([part.scale for part in int4]),
        zero_point=torch.cat(zero_points) if zero_points else None,
    )
