"""An int8 weight whose products take their inputs in int8 as well."""

from dataclasses import dataclass

from torch import Tensor

from bitsmith.quantize.weight import QuantizedWeight

INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """integers: 8 bits, symmetric, one scale for each output channel. input_scale: real input = stored *
    input_scale; None: each token has its own, at run time."""

    integers: QuantizedWeight
    input_scale: float | None

    def __post_init__(self) -> None:
        assert self.integers.num_bits == 8 and self.integers.is_symmetric and self.integers.num_groups == 1
        assert self.input_scale is None or self.input_scale > 0, self.input_scale

    @property
    def in_features(self) -> int:
        return self.integers.in_features

    @property
    def out_features(self) -> int:
        return self.integers.out_features

    def dequantize(self) -> Tensor:
        """[out, in] fp32."""
        return self.integers.dequantize()


def round_inputs(inputs: Tensor, input_scale: float | None) -> Tensor:
    """Inputs as their int8 form stands for them, [tokens, in] fp32; input_scale as in `Int8Weight`."""
    scale: Tensor | float = 1.0 if input_scale is None else input_scale
    if input_scale is None:
        amax = inputs.abs().amax(dim=1, keepdim=True)
        scale = (amax / INT8_MAX).where(amax > 0, 1.0)
    return (inputs / scale).round().clamp(-INT8_MAX - 1, INT8_MAX) * scale
