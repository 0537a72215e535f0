"""A quantized weight whose groups are not neighbouring columns (GPTQ act-order without static groups)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.quantize.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ReorderedWeight:
    """Column `columns[i]` of the module is column i of `weight`. columns: [in] int64, a permutation."""

    weight: QuantizedWeight
    columns: Tensor

    def __post_init__(self) -> None:
        assert self.columns.shape == (self.weight.in_features,), self.columns.shape

    def dequantize(self) -> Tensor:
        """[out, in] fp32."""
        real = self.weight.dequantize()
        return torch.empty_like(real).index_copy_(1, self.columns, real)
