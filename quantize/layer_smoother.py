"""A layer prepared by scales that move between weights and inputs: searched, folded, and proved harmless.

All stages are seen with the layer's unquantized weights, on the inputs that the quantized layers before
give. A stage's columns are multiplied by the scales, the outputs of the operator before are divided by
them; then the layer must still give what it gave, else the fold is undone. What is left out is reported.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from bitsmith.core.manifest import Fallback
from bitsmith.quantize.layer_method import LayerWork, PreparedLayer, Smoothing
from bitsmith.quantize.layer_runner import LayerRunner
from bitsmith.quantize.layer_stages import Stage
from bitsmith.quantize.previous_operator import PreviousOperator, find_previous
from bitsmith.quantize.smoothing import ScaleFamily, search_alpha

_LARGEST_CHANGE = 1e-4  # ||difference|| / ||output|| of the layer on the probe, in fp32

FamilyMaker = Callable[[PreviousOperator], ScaleFamily]


class ScaleRule(Protocol):
    """How a method chooses scales."""

    def observe(self, weights: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> FamilyMaker | None:
        """Scales for a stage, once the operator before it is known; None where its inputs are of no use.

        weights: the stage's, full module name -> [out, in]. inputs: by batch, [tokens, in].
        """


@dataclass(frozen=True, slots=True)
class LayerSmoother:
    """method: its name in reports."""

    method: str
    rule: ScaleRule

    def prepare(self, work: LayerWork) -> PreparedLayer:
        runner = LayerRunner(work.layer, work.hidden_states, work.keywords, work.prefix)
        changed: dict[str, Tensor] = {}
        smoothing: dict[str, Smoothing] = {}
        left_out: dict[str, str] = {}
        earlier: list[str] = []
        for stage in work.stages:
            weights = {f"{work.prefix}.{name}": work.weight(name) for name in stage.modules}
            make_family = self.rule.observe(weights, runner.stage_inputs(stage))
            done = self._smooth(work, stage, earlier, make_family)
            if isinstance(done, str):
                left_out |= dict.fromkeys(stage.modules, done)
            else:
                changed |= done.changed
                smoothing |= dict.fromkeys(stage.modules, done.smoothing)
            runner.finish_stage(stage)
            earlier += stage.modules
        return PreparedLayer(
            {f"{work.prefix}.{name}": tensor for name, tensor in changed.items()},
            {f"{work.prefix}.{name}": found for name, found in smoothing.items()},
            [self._fallback(f"{work.prefix}.{name}", reason) for name, reason in left_out.items()],
        )

    def _fallback(self, name: str, reason: str) -> Fallback:
        return Fallback(name, f"{self.method} with scaled inputs", f"{self.method} without scales", reason)

    def _smooth(
        self, work: LayerWork, stage: Stage, earlier: Sequence[str], make_family: FamilyMaker | None
    ) -> "_Done | str":
        """What was done, or why nothing was."""
        if make_family is None:
            return "calibration gave this module no input, nothing but zeros, or values that are not finite"
        assert work.probe is not None, "the method reads inputs"
        previous = find_previous(work.probe, stage, earlier, work.stored_dtype)
        if previous is None:
            return "no operator before it was found whose outputs can be divided"
        layer = work.layer
        weights = {name: work.weight(name) for name in stage.modules}
        best = search_alpha(make_family(previous), previous.representable)
        expected = work.probe.output()
        kept = {name: _copies(layer, name) for name in (*weights, previous.name)}
        changed = previous.divide(best.scale) if best.alpha else {}
        for weight in weights.values():
            weight *= best.scale[previous.rows]
        change = float((work.probe.output() - expected).norm() / expected.norm().clamp(min=1e-30))
        if not change <= _LARGEST_CHANGE:
            for name, parameters in kept.items():
                _restore(layer, name, parameters)
            return f"dividing the outputs of {previous.name} changed the layer's output by {change:.1e}"
        return _Done(changed, Smoothing(best.alpha, f"{work.prefix}.{previous.name}"))


@dataclass(frozen=True, slots=True)
class _Done:
    changed: Mapping[str, Tensor]
    smoothing: Smoothing


def _copies(layer: nn.Module, name: str) -> dict[str, Tensor]:
    return {key: parameter.clone() for key, parameter in layer.get_submodule(name).named_parameters()}


def _restore(layer: nn.Module, name: str, parameters: Mapping[str, Tensor]) -> None:
    for key, parameter in layer.get_submodule(name).named_parameters():
        parameter.data.copy_(parameters[key])
