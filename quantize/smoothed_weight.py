"""A quantized weight whose inputs are multiplied by a scale of their own first (AWQ, SmoothQuant)."""

from dataclasses import dataclass

from torch import Tensor

from bitsmith.quantize.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class SmoothedWeight:
    """real = weight * pre_quant_scale[in]: what the product computes on inputs that are not scaled yet."""

    weight: QuantizedWeight
    pre_quant_scale: Tensor

    def __post_init__(self) -> None:
        assert self.pre_quant_scale.shape == (self.weight.in_features,), self.pre_quant_scale.shape

    def dequantize(self) -> Tensor:
        """[out, in] fp32."""
        return self.weight.dequantize() * self.pre_quant_scale.float()
