"""In what order the linear modules of a decoder layer take part in its forward.

Found by running the layer once on a few tokens: modules that read the very same tensor form one stage
(q, k, v; gate, up); a module whose output that tensor is (a norm) is the stage's producer; and a stage
whose single output is also its parent's output ends a block (attention, MLP), which later stages need not
run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the layer that ends in a stage. returns_tuple: its output is (tensor, ...)."""

    name: str
    returns_tuple: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Linear modules that share one input, by their names inside the layer. producer: the module whose
    output they read as it is; None where the input is no module's output."""

    modules: tuple[str, ...]
    block: Block | None
    producer: str | None = None


def find_stages(
    layer: nn.Module, hidden_states: Tensor, keywords: Mapping[str, Any], selected: Sequence[str]
) -> tuple[Stage, ...]:
    """Stages of the selected modules in order of execution; a module that is never called is in none."""
    names = {id(module): name for name, module in layer.named_modules()}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    blocks: dict[str, Block] = {}
    others: list[tuple[str, Any]] = []  # kept, so that no later tensor gets the identity of one of them

    def observe(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = names[id(module)]
        if name in selected:
            inputs[name], outputs[name] = args[0], output
            return
        others.append((name, output))
        result = output[0] if isinstance(output, tuple) else output
        for linear_name, linear_output in outputs.items():
            if linear_output is result and linear_name not in blocks:
                blocks[linear_name] = Block(name, isinstance(output, tuple))

    handles = [m.register_forward_hook(observe) for m in layer.modules() if m is not layer]
    try:
        with torch.no_grad():
            layer(hidden_states, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    producers: dict[int, str] = {}
    for name, output in others:
        producers.setdefault(id(output), name)  # the first; what follows hands it on
    return _group(inputs, blocks, producers)


def _group(
    inputs: Mapping[str, Tensor], blocks: Mapping[str, Block], producers: Mapping[int, str]
) -> tuple[Stage, ...]:
    by_input: dict[int, list[str]] = {}
    for name, tensor in inputs.items():
        by_input.setdefault(id(tensor), []).append(name)
    return tuple(
        Stage(tuple(modules), blocks.get(modules[0]) if len(modules) == 1 else None, producers.get(identity))
        for identity, modules in by_input.items()
    )
