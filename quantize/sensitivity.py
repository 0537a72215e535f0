"""What each way of storing a module would cost: measured once, layer by layer, for plans of any budget.

Modules that read one input (q, k, v; gate, up) form one unit, so that engines can go on computing them as one
product. A unit's error is what rounding it alone, on its real inputs, does to its decoder layer's output:
||change||^2 / ||output||^2 for each token, averaged. It is taken from the error of the unit's own output,
tr(E H E^T), times how much of such an error reaches the layer's output, which is measured for one option of
each unit. The layers before are unquantized. Errors of units are added: to first order, small changes of the
residual stream do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.allocation import Option, Unit
from bitsmith.quantize.bit_choice import BitChoice, choice_grid, packed_bytes, scheme_choice
from bitsmith.quantize.bit_plan import unit_from_json
from bitsmith.quantize.decoder_stack import DecoderStack
from bitsmith.quantize.hessian import HessianAccumulator
from bitsmith.quantize.layer_batches import LayerBatches, embed_batches, rows_per_batch
from bitsmith.quantize.layer_runner import LayerRunner
from bitsmith.quantize.layer_stages import find_stages
from bitsmith.quantize.resume_state import ResumeState
from bitsmith.quantize.smoothing import output_error
from bitsmith.quantize.trial_rounding import trial_rounding

_SAMPLE_TOKENS = 1024  # through the layer, to see how much of a unit's error reaches its output


@dataclass(frozen=True, slots=True)
class SensitivitySettings:
    """scheme: resolved. shapes: module -> (out, in), of what is quantized. choices: tried for each module
    that they fit."""

    scheme: QuantizationScheme
    shapes: Mapping[str, tuple[int, int]]
    choices: tuple[BitChoice, ...]
    scale_dtype: torch.dtype


class SensitivityMeter:
    """Runs over the unquantized model. token_ids: [rows, seq]."""

    def __init__(self, stack: DecoderStack, settings: SensitivitySettings, token_ids: Tensor) -> None:
        self._stack = stack
        self._settings = settings
        self._token_ids = token_ids
        seq_len = token_ids.shape[1]
        most = min(rows_per_batch(seq_len), len(token_ids))
        self._num_sample_rows = max(1, min(_SAMPLE_TOKENS // seq_len, most))

    def run(self, state: ResumeState, reporter: Reporter) -> list[Unit]:
        """Units of all layers; those of finished layers are taken from `state`."""
        num_finished, num_layers = state.num_finished(), self._stack.num_layers
        if num_finished < num_layers:
            batches = embed_batches(self._stack, self._token_ids, self._num_sample_rows, keep_reference=False)
            if num_finished:
                batches = batches.with_hidden(state.load_hidden(num_finished - 1))
            left = range(num_finished, num_layers)
            for index in reporter.track(left, total=len(left), label="Measuring what bits cost"):
                batches = self._measure_layer(index, batches, state)
        bodies = (state.load_body(index) for index in range(num_layers))
        return [unit_from_json(entry) for body in bodies for entry in body["units"]]

    def _measure_layer(self, index: int, batches: LayerBatches, state: ResumeState) -> LayerBatches:
        assert batches.probe is not None, "there are calibration tokens"
        layer, prefix = self._stack.materialise(index), self._stack.layer_name(index)
        names = [n for n in self._stack.linear_shapes(index) if f"{prefix}.{n}" in self._settings.shapes]
        sample = _Sample(
            layer, batches.hidden_states[0][: self._num_sample_rows], batches.step_keywords[index]
        )
        probe = batches.probe
        stages = find_stages(layer, probe.hidden_states, probe.keywords[index], names)
        runner = LayerRunner(layer, batches.hidden_states, batches.layer_keywords(index), prefix)
        units = []
        for stage in stages:
            accumulator = HessianAccumulator(layer.get_parameter(f"{stage.modules[0]}.weight").shape[1])
            for inputs in runner.stage_inputs(stage):
                accumulator.add(inputs)
            units.append(self._measure_unit(prefix, stage.modules, accumulator.mean(), sample))
            runner.finish_stage(stage)
            names = [name for name in names if name not in stage.modules]
        units += [self._unseen(f"{prefix}.{name}") for name in names]
        outputs = [] if index == self._stack.num_layers - 1 else list(runner.outputs())
        state.save(index, {"units": [asdict(unit) for unit in units]}, {}, outputs)
        return batches.with_hidden(outputs)

    def _measure_unit(self, prefix: str, modules: Sequence[str], hessian: Tensor, sample: "_Sample") -> Unit:
        weights = {name: sample.layer.get_parameter(f"{name}.weight").data for name in modules}
        stacked = torch.cat(list(weights.values()))
        choices = [choice for choice in self._settings.choices if choice.fits(stacked.shape[1])]
        scheme, scale_dtype = self._settings.scheme, self._settings.scale_dtype
        rounding = trial_rounding(scheme, stacked, hessian)
        reference = choices[len(choices) // 2]
        errors, reaching = {}, 0.0
        for choice in choices:
            real = rounding(choice_grid(scheme, choice, stacked.shape[1], scale_dtype)).dequantize()
            errors[choice] = output_error(real - stacked, hessian)
            if choice == reference and errors[choice] > 0:
                reaching = sample.error_with(weights, real) / errors[choice]
        names = tuple(f"{prefix}.{name}" for name in modules)
        return self._unit(names, lambda choice: reaching * errors[choice], choices)

    def _unseen(self, module: str) -> Unit:
        """A module that the layer's forward never calls: nothing tells what its bits are worth."""
        return self._unit((module,), lambda choice: 0.0, [scheme_choice(self._settings.scheme)])

    def _unit(
        self, names: tuple[str, ...], error: Callable[[BitChoice], float], choices: Sequence[BitChoice]
    ) -> Unit:
        shapes = [self._settings.shapes[name] for name in names]
        symmetric, scale_bytes = self._settings.scheme.symmetric, self._settings.scale_dtype.itemsize
        options = tuple(
            Option(
                choice,
                sum(packed_bytes(shape, choice, scale_bytes, symmetric=symmetric) for shape in shapes),
                error(choice),
            )
            for choice in choices
        )
        return Unit(names, sum(rows * columns for rows, columns in shapes), options)


class _Sample:
    """Some rows through one layer: the output as it is, and how far another weight moves it."""

    def __init__(self, layer: torch.nn.Module, inputs: Tensor, keywords: Any) -> None:
        self.layer = layer
        self._runner = LayerRunner(layer, [inputs], [keywords], "the sample")
        self._output = next(self._runner.outputs())

    def error_with(self, weights: dict[str, Tensor], stacked: Tensor) -> float:
        """weights: module in the layer -> [out, in], put back afterwards. stacked: what they are instead."""
        kept = {name: weight.clone() for name, weight in weights.items()}
        for weight, part in zip(
            weights.values(), torch.split(stacked, [len(w) for w in weights.values()]), strict=True
        ):
            weight.copy_(part)
        change = next(self._runner.outputs()) - self._output
        for name, weight in weights.items():
            weight.copy_(kept[name])
        share = change.square().sum(dim=-1) / self._output.square().sum(dim=-1).clamp(min=1e-30)
        return float(share.double().mean())
