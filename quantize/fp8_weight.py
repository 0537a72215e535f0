"""A weight matrix in FP8 (e4m3) with its scales, and the rounding that makes it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.core.granularity import PerChannel, PerTensor
from bitsmith.quantize.weight import SMALLEST_SCALE

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """real = values * scale; its products take their inputs in e4m3 as well.

    values: [out, in] float8_e4m3fn. scale: fp32, [1] for the tensor or [out, 1] for each output channel.
    input_scale: real input = stored * input_scale; None: each token has its own, at run time.
    """

    values: Tensor
    scale: Tensor
    input_scale: float | None

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.float8_e4m3fn, self.values.dtype
        assert self.scale.shape in ((1,), (self.out_features, 1)), self.scale.shape
        assert self.input_scale is None or self.input_scale > 0, self.input_scale

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    def dequantize(self) -> Tensor:
        """[out, in] fp32."""
        return self.values.float() * self.scale


def quantize_fp8(
    weights: Mapping[str, Tensor], granularity: PerTensor | PerChannel, input_scale: float | None
) -> dict[str, Fp8Weight]:
    """Round to nearest. weights: module name -> [out, in] fp32, all reading the same input.

    Per tensor they share one scale, that of the largest magnitude: fused kernels have only one.
    """
    if isinstance(granularity, PerTensor):
        shared = _scale(torch.stack([weight.abs().max() for weight in weights.values()]).max().reshape(1))
        scales = dict.fromkeys(weights, shared)
    else:
        scales = {name: _scale(weight.abs().amax(dim=1, keepdim=True)) for name, weight in weights.items()}
    return {
        name: Fp8Weight(to_fp8(weight, scales[name]), scales[name].clone(), input_scale)
        for name, weight in weights.items()
    }


def to_fp8(real: Tensor, scale: Tensor) -> Tensor:
    """real / scale in e4m3, saturating at its largest value."""
    return (real / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _scale(amax: Tensor) -> Tensor:
    return (amax.float() / FP8_MAX).clamp(min=SMALLEST_SCALE)
