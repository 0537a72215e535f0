"""One decoder layer refined by gradient: its quantized weights learn to give the original layer's output.

Inputs are those that the quantized layers before give; targets are the outputs of the unquantized model, so
that a layer also makes up for some of what the layers before it lost. Kept only where rows that were not
learned from came closer to their targets. Not known here: how a weight moves under its gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitsmith.quantize.records import RefineRecord
from bitsmith.quantize.signround import LearnedRounding
from bitsmith.quantize.weight import QuantizedWeight

_ROWS_PER_STEP = 4
_HELD_OUT_SHARE = 16  # one row in so many, and at least one step's rows


@dataclass(frozen=True, slots=True)
class RefineSettings:
    """num_steps: signed gradient steps for each layer. seed: chooses the rows of each step."""

    num_steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class RefineRows:
    """inputs, targets: the layer's, [rows, seq, hidden]. keywords: of a call with `rows_per_step` rows."""

    inputs: Tensor
    targets: Tensor
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RefinedLayer:
    """weights: by module name in the layer."""

    weights: Mapping[str, QuantizedWeight]
    record: RefineRecord


def rows_per_step(num_rows: int) -> int:
    """Rows in the loss of one step; of at least two rows, at least as many are held out."""
    return min(_ROWS_PER_STEP, num_rows // 2)


def refine_layer(
    layer: nn.Module,
    start: Mapping[str, tuple[Tensor, QuantizedWeight]],
    rows: RefineRows,
    settings: RefineSettings,
    name: str,
) -> RefinedLayer:
    """start: module name in the layer -> (original weight, its quantized form). On return the layer holds
    the weights that are returned: the learned ones or, where those did worse, the start. name: of the layer.
    """
    learned = {module: LearnedRounding(*pair) for module, pair in start.items()}
    weights = {module: layer.get_parameter(f"{module}.weight") for module in start}
    step_rows = rows_per_step(len(rows.inputs))
    num_held_out = step_rows * max(1, len(rows.inputs) // (_HELD_OUT_SHARE * step_rows))
    num_learned = len(rows.inputs) - num_held_out

    def loss(chosen: Tensor) -> Tensor:
        output = layer(rows.inputs[chosen], **rows.keywords)
        difference = (output[0] if isinstance(output, tuple) else output) - rows.targets[chosen]
        lost: Tensor = difference.square().sum() / rows.targets[chosen].square().sum().clamp(min=1e-30)
        return lost

    before = _held_out_loss(loss, num_learned, num_held_out, step_rows)
    losses = []
    generator = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.num_steps):
        chosen = torch.randperm(num_learned, generator=generator)[:step_rows]
        # Section 3 of SignRound: the rate falls linearly; there from 1 / steps.
        rate = (1 - step / settings.num_steps) / settings.num_steps
        losses.append(_step(loss, chosen, learned, weights, rate))
    _install(weights, {module: rounding.real() for module, rounding in learned.items()})
    after = _held_out_loss(loss, num_learned, num_held_out, step_rows)
    result = {module: rounding.quantized() for module, rounding in learned.items()}
    if not after < before:
        result = {module: quantized for module, (_, quantized) in start.items()}
        _install(weights, {module: quantized.dequantize() for module, quantized in result.items()})
    return RefinedLayer(result, RefineRecord(name, after < before, before, after, losses))


def _step(
    loss: Callable[[Tensor], Tensor],
    chosen: Tensor,
    learned: Mapping[str, LearnedRounding],
    weights: Mapping[str, Tensor],
    rate: float,
) -> float:
    """The loss before the step."""
    _install(weights, {module: rounding.real() for module, rounding in learned.items()})
    for weight in weights.values():
        weight.requires_grad_(True)
    with torch.enable_grad():
        value = loss(chosen)
        gradients = torch.autograd.grad(value, list(weights.values()))
    for weight in weights.values():
        weight.requires_grad_(False)
    for rounding, gradient in zip(learned.values(), gradients, strict=True):
        rounding.step(gradient, rate)
    return float(value.detach())


def _held_out_loss(loss: Callable[[Tensor], Tensor], first: int, count: int, step_rows: int) -> float:
    with torch.no_grad():
        chunks = torch.split(torch.arange(first, first + count), step_rows)
        return sum(float(loss(chunk)) for chunk in chunks) / len(chunks)


def _install(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for module, weight in weights.items():
        weight.data.copy_(values[module])
