"""The layer-by-layer driver: one decoder layer in memory at a time, all calibration batches through it.

A layer is filled from the checkpoint, quantized stage by stage on the activations that the quantized
modules before it produce, saved, and dropped. Not known here: numeric methods, files of the result.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitsmith.core.errors import WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.decoder_stack import DecoderStack, LayerCalls, cache_argument
from bitsmith.quantize.kv_scales import KVObserver
from bitsmith.quantize.layer_method import LayerWork
from bitsmith.quantize.layer_refiner import RefineRows, RefineSettings, refine_layer, rows_per_step
from bitsmith.quantize.layer_result import LayerResult
from bitsmith.quantize.layer_runner import LayerRunner
from bitsmith.quantize.layer_stages import Stage, find_stages
from bitsmith.quantize.methods import choose_method
from bitsmith.quantize.previous_operator import LayerProbe
from bitsmith.quantize.records import LayerReport, is_finite
from bitsmith.quantize.resume_state import ResumeState
from bitsmith.quantize.stage_quantizer import QuantizedStage

TOKENS_PER_BATCH = 4096
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class _Batches:
    """hidden_states: by batch, what the next layer reads. keywords: by batch, then by layer.
    probe: the calls of a few tokens, None where no tokens are needed. reference: by batch, what the next
    layer reads in the unquantized model, and step_keywords: by layer; both empty unless layers are
    refined."""

    hidden_states: list[Tensor]
    keywords: Sequence[Sequence[Mapping[str, Any]]]
    probe: LayerCalls | None
    reference: list[Tensor]
    step_keywords: Sequence[Mapping[str, Any]]


class LayerwiseQuantizer:
    """Runs one resolved scheme over a stack. token_ids: [num_samples, seq_len], or None where unneeded.
    seed: of refinement, where the scheme asks for it."""

    def __init__(
        self,
        stack: DecoderStack,
        scheme: QuantizationScheme,
        selected: Sequence[str],
        scale_dtype: torch.dtype,
        token_ids: Tensor | None,
        seed: int,
    ) -> None:
        self._stack = stack
        self._scheme = scheme
        self._selected = frozenset(selected)
        self._method = choose_method(scheme, scale_dtype)
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
                batches = _with_hidden(batches, state.load_hidden(num_finished - 1))
            left = range(num_finished, num_layers)
            for index in reporter.track(left, total=len(left), label="Quantizing layers"):
                batches = self._do_layer(index, batches, state)
        return [state.load_report(index) for index in range(num_layers)]

    def _first_batches(self) -> _Batches:
        """The embedded tokens, and what the layers are called with besides."""
        if self._token_ids is None:
            return _Batches([], [], None, [], [])
        batch_size = max(1, TOKENS_PER_BATCH // self._token_ids.shape[1])
        self._stack.fill_embedding()
        hidden, keywords = [], []
        by_size: dict[int, Sequence[Mapping[str, Any]]] = {}
        for rows in torch.split(self._token_ids, batch_size):
            calls = self._stack.layer_calls(rows)
            hidden.append(calls.hidden_states)
            # Rows are of one length and unpadded, so masks depend on the batch's size alone.
            keywords.append(by_size.setdefault(rows.shape[0], calls.keywords))
        probe = self._stack.layer_calls(self._token_ids[:1, :_PROBE_TOKENS])
        reference: list[Tensor] = []
        step_keywords: Sequence[Mapping[str, Any]] = []
        if self._scheme.refine_steps:
            reference = list(hidden)
            step_ids = self._token_ids[: rows_per_step(len(self._token_ids))]
            step_keywords = self._stack.layer_calls(step_ids).keywords
        self._stack.release_embedding()
        return _Batches(hidden, keywords, probe, reference, step_keywords)

    def _do_layer(self, index: int, batches: _Batches, state: ResumeState) -> _Batches:
        layer = self._stack.materialise(index)
        keywords = [by_layer[index] for by_layer in batches.keywords]
        reference = list(LayerRunner(layer, batches.reference, keywords).outputs())
        work = self._work(index, layer, batches, keywords)
        result = LayerResult(work.prefix, self._method.preparation.prepare(work))
        originals = {n: work.weight(n).clone() for n in self._selected_in(index)} if reference else {}
        observer, runner = self._observed(layer, batches, keywords)
        self._quantize_modules(index, work, runner, result)
        if reference:
            rows = RefineRows(
                torch.cat(batches.hidden_states), torch.cat(reference), batches.step_keywords[index]
            )
            start = {name: (originals[name], weight) for name, weight in result.rounded().items()}
            settings = RefineSettings(self._scheme.refine_steps, self._seed)
            result.add_refined(refine_layer(layer, start, rows, settings, work.prefix), originals)
            # What was observed and stored so far came from the weights before.
            observer, runner = self._observed(layer, batches, keywords)
        is_last = index == self._stack.num_layers - 1
        outputs = [] if is_last and observer is None else list(runner.outputs())
        if not all(is_finite(output) for output in outputs):
            raise WorkFailed(
                f"The activations after {work.prefix} are not finite: the model overflows "
                "on the calibration data. Check its weights, or calibrate on other text."
            )
        if observer is not None and self._scheme.kv_cache != "none":
            result.add_kv_scales(observer.scales(self._scheme.kv_cache))
        hidden = [] if is_last else [*outputs, *reference]
        state.save(index, result.report(), result.tensors(), hidden)
        return _with_hidden(batches, hidden)

    def _observed(
        self, layer: nn.Module, batches: _Batches, keywords: Sequence[Mapping[str, Any]]
    ) -> tuple[KVObserver | None, LayerRunner]:
        """A runner of the layer and, where its cache gets scales, the observer of what it puts there."""
        if self._scheme.kv_cache == "none":
            return None, LayerRunner(layer, batches.hidden_states, keywords)
        observer = KVObserver()
        extra = {cache_argument(layer): observer}
        return observer, LayerRunner(layer, batches.hidden_states, [{**k, **extra} for k in keywords])

    def _selected_in(self, index: int) -> list[str]:
        prefix = self._stack.layer_name(index)
        return [name for name in self._stack.linear_shapes(index) if f"{prefix}.{name}" in self._selected]

    def _work(
        self, index: int, layer: nn.Module, batches: _Batches, keywords: Sequence[Mapping[str, Any]]
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


def _with_hidden(batches: _Batches, hidden: list[Tensor]) -> _Batches:
    """hidden: as `ResumeState` keeps it, the next layer's inputs followed by the reference's, if any."""
    num_batches = len(batches.keywords)
    return dataclasses.replace(batches, hidden_states=hidden[:num_batches], reference=hidden[num_batches:])
