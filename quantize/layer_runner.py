"""All calibration batches through one decoder layer, stage by stage, each product computed once.

Before a stage's modules are quantized, every batch runs up to their input and stops there; blocks that
are finished (attention, MLP) are replaced by their stored outputs. So every stage sees what the
quantized modules before it produce, inside the layer too, and the linear modules run once for each
batch. Not known here: how modules are quantized.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitsmith.core.errors import WorkFailed
from bitsmith.quantize.layer_stages import Block, Stage
from bitsmith.quantize.records import is_finite


class _Stop(Exception):
    """The wanted input was seen; the rest of the forward is not needed."""


class LayerRunner:
    """The layer, its inputs by batch ([batch, seq, hidden], fp32), its calls' other arguments, its name."""

    def __init__(
        self,
        layer: nn.Module,
        hidden_states: Sequence[Tensor],
        keywords: Sequence[Mapping[str, Any]],
        name: str = "the layer",
    ) -> None:
        self._layer = layer
        self._name = name
        self._hidden_states = hidden_states
        self._keywords = keywords
        self._block_inputs: list[Tensor] = []
        self._finished: list[dict[Block, Tensor]] = [{} for _ in hidden_states]

    def stage_inputs(self, stage: Stage) -> Iterator[Tensor]:
        """For each batch what the stage's modules read: [tokens, in]."""
        self._block_inputs = []
        for batch in range(len(self._hidden_states)):
            inputs = self._run_until(batch, self._layer.get_submodule(stage.modules[0]))
            if stage.block is not None:
                self._block_inputs.append(inputs)
            yield inputs.flatten(0, -2)

    def finish_stage(self, stage: Stage) -> None:
        """To be called when the stage's modules hold their final weights."""
        if stage.block is None:
            return
        module = self._layer.get_submodule(stage.modules[0])
        for batch, inputs in enumerate(self._block_inputs):
            self._finished[batch][stage.block] = module(inputs)
        self._block_inputs = []

    def outputs(self) -> Iterator[Tensor]:
        """For each batch the layer's output. Raises WorkFailed where one is not finite."""
        for batch in range(len(self._hidden_states)):
            output = self._run(batch)
            if not is_finite(output):
                raise WorkFailed(
                    f"The activations after {self._name} are not finite: the model overflows on the "
                    "calibration data. Check its weights, or calibrate on other text."
                )
            yield output

    def _run_until(self, batch: int, module: nn.Module) -> Tensor:
        seen: list[Tensor] = []

        def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _Stop

        handle = module.register_forward_pre_hook(stop)
        try:
            self._run(batch)
        except _Stop:
            pass
        finally:
            handle.remove()
        assert len(seen) == 1, "the stage's module was not reached"
        return seen[0]

    def _run(self, batch: int) -> Tensor:
        with torch.no_grad(), self._finished_blocks(self._finished[batch]):
            output = self._layer(self._hidden_states[batch], **self._keywords[batch])
        result = output[0] if isinstance(output, tuple) else output
        assert isinstance(result, Tensor)
        return result

    @contextlib.contextmanager
    def _finished_blocks(self, finished: Mapping[Block, Tensor]) -> Iterator[None]:
        """While inside, finished blocks return their stored outputs."""

        def stored(block: Block, output: Tensor) -> Any:
            result = (output, None) if block.returns_tuple else output
            return lambda *args, **kwargs: result

        modules = [(self._layer.get_submodule(block.name), stored(block, o)) for block, o in finished.items()]
        for module, forward in modules:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in modules:
                del module.forward
