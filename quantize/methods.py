"""The methods that a scheme can name, each as the driver wants it; chosen once for a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bitsmith.core.manifest import Fallback
from bitsmith.core.scheme import ActivationScale, QuantizationScheme
from bitsmith.quantize.awq import AwqFamily
from bitsmith.quantize.bit_choice import BitChoice, choice_grid, scheme_choice
from bitsmith.quantize.fp8_stage import input_amax, quantize_by_fp8
from bitsmith.quantize.hessian import HessianAccumulator
from bitsmith.quantize.input_range import InputRange
from bitsmith.quantize.input_statistics import InputStatistics
from bitsmith.quantize.int8_stage import quantize_by_int8
from bitsmith.quantize.layer_method import LayerMethod, NothingToPrepare, StageMethod
from bitsmith.quantize.layer_smoother import FamilyMaker, LayerSmoother
from bitsmith.quantize.qparams import Grid
from bitsmith.quantize.smoothquant import SmoothQuantFamily
from bitsmith.quantize.stage_quantizer import (
    QuantizedStage,
    quantize_by_clips,
    quantize_by_gptq,
    quantize_by_rtn,
)


def choose_method(
    scheme: QuantizationScheme, scale_dtype: torch.dtype, choices: Mapping[str, BitChoice]
) -> LayerMethod:
    """scheme: resolved. scale_dtype: in which scales of integers are stored. choices: module -> how its
    integers are stored, of those that differ from the scheme."""
    grids = GridMaker(scheme, scale_dtype, choices)
    if scheme.method == "smoothquant":
        assert scheme.activation_scale is not None, scheme
        smoother = LayerSmoother(scheme.method, SmoothQuantScales(scheme.activation_scale))
        return LayerMethod(smoother, Int8Rounding(scheme.activation_scale, scale_dtype))
    if scheme.activation_scale is not None:
        return LayerMethod(NothingToPrepare(), Fp8Rounding(scheme.activation_scale))
    rounding: StageMethod = PlainRounding(grids)
    if scheme.uses_gptq:
        rounding = Compensation(grids, scheme.act_order is True)
    elif scheme.method == "awq":
        rounding = ClippedRounding(grids)
    if scheme.method == "awq" or scheme.method == "awq-gptq":
        return LayerMethod(LayerSmoother(scheme.method, AwqScales(grids)), rounding)
    return LayerMethod(NothingToPrepare(), rounding)


@dataclass(frozen=True, slots=True)
class GridMaker:
    """Grids of a scheme, and of modules for which another width or group size was chosen."""

    scheme: QuantizationScheme
    scale_dtype: torch.dtype
    choices: Mapping[str, BitChoice]

    def grid(self, weights: Mapping[str, Tensor]) -> Grid:
        """weights: full module name -> [out, in], of modules that are stored alike."""
        name, weight = next(iter(weights.items()))
        choice = self.choices.get(name) or scheme_choice(self.scheme)
        return choice_grid(self.scheme, choice, weight.shape[1], self.scale_dtype)


@dataclass(frozen=True, slots=True)
class AwqScales:
    """From the Hessian and the mean magnitudes of a stage's inputs."""

    grids: GridMaker

    def observe(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> FamilyMaker | None:
        weight, grid = torch.cat(list(weights.values())), self.grids.grid(weights)
        seen = InputStatistics(weight.shape[1], inputs)
        if not seen.are_usable():
            return None
        return lambda previous: AwqFamily(
            weight, seen.hessian, seen.mean_magnitude, previous.rows, previous.num_rows, grid
        )


@dataclass(frozen=True, slots=True)
class SmoothQuantScales:
    """From the largest magnitudes of a stage's inputs and a sample of its tokens."""

    activations: ActivationScale

    def observe(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> FamilyMaker | None:
        weight = torch.cat(list(weights.values()))
        seen = InputRange(weight.shape[1], inputs)
        if not seen.is_usable():
            return None
        return lambda previous: SmoothQuantFamily(
            weight, seen, self.activations, previous.rows, previous.num_rows
        )


@dataclass(frozen=True, slots=True)
class PlainRounding:
    """Round to nearest: reads no inputs."""

    grids: GridMaker
    reads_inputs: bool = False

    def quantize(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> QuantizedStage:
        raise AssertionError("round to nearest reads no inputs")

    def quantize_unseen(self, weights: Mapping[str, Tensor]) -> QuantizedStage:
        return quantize_by_rtn(weights, self.grids.grid(weights))


@dataclass(frozen=True, slots=True)
class ClippedRounding:
    """Round to nearest with the clip of each group that costs its output least."""

    grids: GridMaker
    reads_inputs: bool = True

    def quantize(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> QuantizedStage:
        return quantize_by_clips(weights, _hessian(_num_columns(weights), inputs), self.grids.grid(weights))

    def quantize_unseen(self, weights: Mapping[str, Tensor]) -> QuantizedStage:
        return _rounded_unseen(weights, self.grids, "awq")


@dataclass(frozen=True, slots=True)
class Compensation:
    """GPTQ."""

    grids: GridMaker
    act_order: bool
    reads_inputs: bool = True

    def quantize(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> QuantizedStage:
        hessian = _hessian(_num_columns(weights), inputs)
        return quantize_by_gptq(weights, hessian, self.grids.grid(weights), act_order=self.act_order)

    def quantize_unseen(self, weights: Mapping[str, Tensor]) -> QuantizedStage:
        return _rounded_unseen(weights, self.grids, "gptq")


@dataclass(frozen=True, slots=True)
class Fp8Rounding:
    """FP8; where input scales are static, the largest input of each stage gives its scale."""

    activations: ActivationScale

    @property
    def reads_inputs(self) -> bool:
        return self.activations == "tensor"

    def quantize(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> QuantizedStage:
        return quantize_by_fp8(weights, self.activations, input_amax(inputs))

    def quantize_unseen(self, weights: Mapping[str, Tensor]) -> QuantizedStage:
        return quantize_by_fp8(weights, self.activations, 0.0)


@dataclass(frozen=True, slots=True)
class Int8Rounding:
    """INT8 weights and inputs; where input scales are static, the largest input of each stage gives its."""

    activations: ActivationScale
    scale_dtype: torch.dtype
    reads_inputs: bool = True

    def quantize(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> QuantizedStage:
        seen = InputRange(_num_columns(weights), inputs)
        return quantize_by_int8(weights, seen, self.activations, self.scale_dtype)

    def quantize_unseen(self, weights: Mapping[str, Tensor]) -> QuantizedStage:
        return self.quantize(weights, ())


def _num_columns(weights: Mapping[str, Tensor]) -> int:
    return next(iter(weights.values())).shape[1]


def _hessian(num_columns: int, inputs: Iterable[Tensor]) -> Tensor:
    accumulator = HessianAccumulator(num_columns)
    for batch in inputs:
        accumulator.add(batch)
    return accumulator.mean()


def _rounded_unseen(weights: Mapping[str, Tensor], grids: GridMaker, asked: str) -> QuantizedStage:
    rounded = quantize_by_rtn(weights, grids.grid(weights))
    reason = "the layer's forward never calls it"
    return replace(
        rounded, fallbacks=[Fallback(name, asked, "round to nearest", reason) for name in rounded.weights]
    )
