"""A decoder model of transformers whose layers exist one at a time.

The model is built on the meta device; the embedding is filled from the checkpoint, and so is any one
layer on request. What each layer is called with (masks, rotary tables, positions) is taken from the
model's own forward, so that every architecture keeps its own rules. Not known here: quantization.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """What one batch brings to the layers.

    hidden_states: [batch, seq, hidden], the first layer's input. keywords: for each layer, the other
    arguments of its call.
    """

    hidden_states: Tensor
    keywords: Sequence[Mapping[str, Any]]


class _Stop(Exception):
    """Ends a forward whose rest is not wanted."""


class DecoderStack:
    """The decoder layers of a checkpoint, fp32, on the processor."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._model = _meta_model(reader)
        self._base: nn.Module = self._model.base_model
        layers = getattr(self._base, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            raise Refused(
                f"{type(self._model).__name__} has no list of decoder layers where they were looked for; "
                "this architecture cannot be quantized."
            )
        self._layers = layers
        self._prefix = _name_within(self._model, layers)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer_name(self, index: int) -> str:
        """State-dict prefix of a layer, without the final dot."""
        return f"{self._prefix}.{index}"

    def linear_shapes(self, index: int) -> dict[str, tuple[int, int]]:
        """Name inside the layer -> (out, in) of every linear module, in the order of definition."""
        modules = self._layers[index].named_modules()
        return {name: (m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear)}

    def unquantized_modules(self) -> dict[str, str]:
        """Name -> class of the modules outside the layers that hold weights: embedding, norm, head."""
        inside = {id(m) for layer in self._layers for m in layer.modules()}
        return {
            name: type(module).__name__
            for name, module in self._model.named_modules()
            if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
        }

    def missing_names(self) -> list[str]:
        """State-dict names of layers and embedding that the checkpoint lacks."""
        base_name = _name_within(self._model, self._base)
        names = (f"{base_name}.{name}" for name, _ in self._base.named_parameters())
        return [name for name in names if name not in self._reader]

    def materialise(self, index: int) -> nn.Module:
        """Layer `index` with its weights in fp32; the caller releases it by dropping it."""
        layer = copy.deepcopy(self._layers[index])
        for name, module in layer.named_modules():
            self._fill(module, f"{self.layer_name(index)}.{name}".removesuffix("."))
        return layer.eval().requires_grad_(False)

    def stored_dtype(self, index: int, name: str) -> torch.dtype:
        """The checkpoint's dtype of a layer's parameter. name: inside the layer."""
        return self._reader.dtype(f"{self.layer_name(index)}.{name}")

    def fill_embedding(self) -> None:
        """Load what lies before the layers; `release_embedding` drops it again."""
        inside = {id(m) for m in self._layers.modules()}
        for name, module in self._base.named_modules():
            if id(module) not in inside:
                self._fill(module, f"{_name_within(self._model, self._base)}.{name}".removesuffix("."))

    def release_embedding(self) -> None:
        self._base.to("meta")

    def layer_calls(self, token_ids: Tensor) -> LayerCalls:
        """Run the model's own forward up to and between the layers. token_ids: [batch, seq]."""
        first: list[Tensor] = []
        keywords: list[Mapping[str, Any]] = []

        def record(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            assert not args, "decoder layers are called with keywords"
            first.append(hidden_states)
            keywords.append({name: v for name, v in kwargs.items() if v is not None and v is not False})
            if len(keywords) == self.num_layers:
                raise _Stop
            return hidden_states

        for layer in self._layers:
            layer.forward = record
        try:
            self._base(input_ids=token_ids, use_cache=False)
        except _Stop:
            pass
        finally:
            for layer in self._layers:
                del layer.forward
        return LayerCalls(first[0], keywords)

    def _fill(self, module: nn.Module, name: str) -> None:
        """Give one module's own parameters and buffers memory and values."""
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        if not parameters and not buffers:
            return
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for key, parameter in module.named_parameters(recurse=False):
                parameter.copy_(self._reader.tensor(f"{name}.{key}"))
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            if buffers:
                # Buffers are not in checkpoints (rotary frequencies, embedding scale): the model computes
                # them. Parameters are marked as done above, and the caller's random state is kept.
                with torch.random.fork_rng(devices=[]):
                    self._model._init_weights(module)  # type: ignore[no-untyped-call]


def cache_argument(layer: nn.Module) -> str:
    """Name of the argument by which a decoder layer takes the KV cache in this transformers release."""
    parameters = inspect.signature(layer.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _meta_model(reader: CheckpointReader) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(reader.path, local_files_only=True, trust_remote_code=False)
        # Soft caps on attention logits exist only in the eager form.
        form = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=form, dtype=torch.float32, trust_remote_code=False
            )
    except (ValueError, KeyError, ImportError, OSError) as error:
        raise Refused(f"transformers cannot build the model of {reader.path}: {error}") from error
    model.train(False)
    return model


def _name_within(model: nn.Module, wanted: nn.Module) -> str:
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(wanted)]
