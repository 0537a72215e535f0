"""The layer-by-layer driver: one decoder layer in memory at a time, all calibration batches through it.

A layer is filled from the checkpoint, quantized stage by stage on the activations that the quantized
modules before it produce, saved, and dropped. Not known here: numeric methods, files of the result.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.decoder_stack import DecoderStack, cache_argument
from bitsmith.quantize.kv_scales import KVObserver
from bitsmith.quantize.layer_batches import LayerBatches, embed_batches
from bitsmith.quantize.layer_method import LayerMethod, LayerWork
from bitsmith.quantize.layer_refiner import RefineRows, RefineSettings, refine_layer, rows_per_step
from bitsmith.quantize.layer_result import LayerResult
from bitsmith.quantize.layer_runner import LayerRunner
from bitsmith.quantize.layer_stages import Stage, find_stages
from bitsmith.quantize.previous_operator import LayerProbe
from bitsmith.quantize.records import LayerReport
from bitsmith.quantize.resume_state import ResumeState
from bitsmith.quantize.stage_quantizer import QuantizedStage


class LayerwiseQuantizer:
    """Runs one resolved scheme over a stack. token_ids: [num_samples, seq_len], or None where unneeded.
    seed: of refinement, where the scheme asks for it."""

    def __init__(
        self,
        stack: DecoderStack,
        scheme: QuantizationScheme,
        selected: Sequence[str],
        method: LayerMethod,
        token_ids: Tensor | None,
        seed: int,
    ) -> None:
        self._stack = stack
        self._scheme = scheme
        self._selected = frozenset(selected)
        self._method = method
        self._token_ids = token_ids
        self._seed = seed

    def run(self, state: ResumeState, reporter: Reporter) -> list[LayerReport]:
        """Quantize every layer that `state` does not hold yet; reports of all layers."""
        num_finished, num_layers = state.num_finished(), self._stack.num_layers
        if num_finished < num_layers:
            if num_finished:
                reporter.say(f"Resuming: {num_finished} of {num_layers} layers are finished.")
            batches = self._first_batches()
            if num_finished:
                batches = batches.with_hidden(state.load_hidden(num_finished - 1))
            left = range(num_finished, num_layers)
            for index in reporter.track(left, total=len(left), label="Quantizing layers"):
                batches = self._do_layer(index, batches, state)
        return [LayerReport.from_json(state.load_body(index)) for index in range(num_layers)]

    def _first_batches(self) -> LayerBatches:
        """The embedded tokens, if the method needs any."""
        if self._token_ids is None:
            return LayerBatches.none()
        refines = self._scheme.refine_steps > 0
        num_step_rows = rows_per_step(len(self._token_ids)) if refines else 0
        return embed_batches(self._stack, self._token_ids, num_step_rows, keep_reference=refines)

    def _do_layer(self, index: int, batches: LayerBatches, state: ResumeState) -> LayerBatches:
        layer = self._stack.materialise(index)
        keywords = batches.layer_keywords(index)
        work = self._work(index, layer, batches, keywords)
        reference = list(LayerRunner(layer, batches.reference, keywords, work.prefix).outputs())
        result = LayerResult(work.prefix, self._method.preparation.prepare(work))
        originals = {n: work.weight(n).clone() for n in self._selected_in(index)} if reference else {}
        observer, runner = self._observed(work)
        self._quantize_modules(index, work, runner, result)
        if reference:
            rows = RefineRows(
                torch.cat(batches.hidden_states), torch.cat(reference), batches.step_keywords[index]
            )
            start = {name: (originals[name], weight) for name, weight in result.rounded().items()}
            settings = RefineSettings(self._scheme.refine_steps, self._seed)
            result.add_refined(refine_layer(layer, start, rows, settings, work.prefix), originals)
            # What was observed and stored so far came from the weights before.
            observer, runner = self._observed(work)
        is_last = index == self._stack.num_layers - 1
        outputs = [] if is_last and observer is None else list(runner.outputs())
        if observer is not None and self._scheme.kv_cache != "none":
            result.add_kv_scales(observer.scales(self._scheme.kv_cache))
        hidden = [] if is_last else [*outputs, *reference]
        state.save(index, result.report().to_json(), result.tensors(), hidden)
        return batches.with_hidden(hidden)

    def _observed(self, work: LayerWork) -> tuple[KVObserver | None, LayerRunner]:
        """A runner of the layer and, where its cache gets scales, the observer of what it puts there."""
        if self._scheme.kv_cache == "none":
            return None, LayerRunner(work.layer, work.hidden_states, work.keywords, work.prefix)
        observer = KVObserver()
        extra = {cache_argument(work.layer): observer}
        keywords = [{**given, **extra} for given in work.keywords]
        return observer, LayerRunner(work.layer, work.hidden_states, keywords, work.prefix)

    def _selected_in(self, index: int) -> list[str]:
        prefix = self._stack.layer_name(index)
        return [name for name in self._stack.linear_shapes(index) if f"{prefix}.{name}" in self._selected]

    def _work(
        self, index: int, layer: nn.Module, batches: LayerBatches, keywords: Sequence[Mapping[str, Any]]
    ) -> LayerWork:
        probe, stages = None, tuple[Stage, ...]()
        if self._method.stage.reads_inputs:
            assert batches.probe is not None, "there are calibration tokens"
            probe = LayerProbe(layer, batches.probe.hidden_states, batches.probe.keywords[index])
            stages = find_stages(layer, probe.hidden_states, probe.keywords, self._selected_in(index))
        return LayerWork(
            self._stack.layer_name(index),
            layer,
            stages,
            batches.hidden_states,
            keywords,
            probe,
            partial(self._stack.stored_dtype, index),
        )

    def _quantize_modules(
        self, index: int, work: LayerWork, runner: LayerRunner, result: LayerResult
    ) -> None:
        left = dict.fromkeys(self._selected_in(index))
        for stage in work.stages:
            weights = {f"{work.prefix}.{name}": work.weight(name) for name in stage.modules}
            quantized = self._method.stage.quantize(weights, runner.stage_inputs(stage))
            _install(work, quantized, result)
            runner.finish_stage(stage)
            for name in stage.modules:
                del left[name]
        for name in left:
            weights = {f"{work.prefix}.{name}": work.weight(name)}
            _install(work, self._method.stage.quantize_unseen(weights), result)


def _install(work: LayerWork, quantized: QuantizedStage, result: LayerResult) -> None:
    """Put the quantized weights into the layer and into the result."""
    for name, weight in quantized.weights.items():
        work.weight(name.removeprefix(f"{work.prefix}.")).copy_(weight.dequantize())
    result.add(quantized)
