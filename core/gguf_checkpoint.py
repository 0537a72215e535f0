"""Convert a GGUF file into a Hugging Face directory of bf16 safetensors.

GGUF is another program's layout, with three traps: Llama's q and k rows are interleaved for its rotary
variant, Gemma's norm weights are stored plus one, and the tokenizer is described rather than stored.
Every tensor of the file must find its place and every tensor of the model must be filled, or the file
is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.errors import Refused
from bitsmith.core.gguf_config import Architecture, architecture_of, build_config, generation_config
from bitsmith.core.gguf_tokenizer import write_tokenizer
from bitsmith.core.progress import Reporter

_ROPE_DIVISORS = "rope_freqs.weight"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAME = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<part>[a-z_]+)\.(?P<kind>weight|bias)$")


class GGUFCheckpoint:
    """A GGUF file opened and checked: known architecture, known tensor types, every tensor placed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in self._reader.fields.items() if field.types
            }
        except (ValueError, IndexError, KeyError, OverflowError, TypeError, UnicodeDecodeError) as error:
            raise Refused(f"{path} is not a readable GGUF file: {error}.") from error
        self.architecture = architecture_of(self.metadata)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._places = {
            name: hf_name(name, self.architecture) for name in self._tensors if name != _ROPE_DIVISORS
        }
        self._check_types()
        self.config = self._build_config()
        self._check_shapes()

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, dequantized fp32 tensor) in the order of the file."""
        for name, place in self._places.items():
            tensor = self._tensors[name]
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            values = np.asarray(values, np.float32).reshape(_shape(tensor))
            yield place, torch.from_numpy(self._restored(name, values).copy())

    def _restored(self, name: str, values: np.ndarray) -> np.ndarray:
        if self.architecture.has_permuted_rotary and (match := _BLOCK_NAME.match(name)):
            if match["part"] == "attn_q":
                return unpermuted(values, self.config["num_attention_heads"])
            if match["part"] == "attn_k":
                return unpermuted(values, self.config["num_key_value_heads"])
        if self.architecture.is_gemma and name.endswith("norm.weight"):
            return values - np.float32(1)
        return values

    def _check_types(self) -> None:
        for kind in {tensor.tensor_type for tensor in self._tensors.values()}:
            _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            try:
                gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            except NotImplementedError as error:
                raise Refused(
                    f"{self.path} holds tensors of type {kind.name}, which cannot be read."
                ) from error

    def _build_config(self) -> dict[str, Any]:
        if "token_embd.weight" not in self._tensors:
            raise Refused(f"{self.path} has no tensor token_embd.weight.")
        divisors = None
        if _ROPE_DIVISORS in self._tensors:
            tensor = self._tensors[_ROPE_DIVISORS]
            divisors = gguf.dequantize(tensor.data, tensor.tensor_type)
        return build_config(
            self.metadata,
            vocab_size=_shape(self._tensors["token_embd.weight"])[0],
            is_tied="output.weight" not in self._tensors,
            has_attention_bias="blk.0.attn_output.bias" in self._tensors,
            rope_divisors=divisors,
        )

    def _check_shapes(self) -> None:
        """Compare with the tensors that transformers' own module for this config has."""
        expected = _expected_shapes(self.config)
        found = {place: _shape(self._tensors[name]) for name, place in self._places.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise Refused(
                    f"{self.path}: tensor {name} has shape {found.get(name)}, "
                    f"but the model that its metadata describes has {expected.get(name)}."
                )


def convert_gguf(path: Path, directory: Path, reporter: Reporter) -> dict[str, Any]:
    """Write the model directory; returns what the file says of itself."""
    source = GGUFCheckpoint(path)
    _write_json(directory / "config.json", source.config)
    _write_json(directory / "generation_config.json", generation_config(source.metadata))
    write_tokenizer(source.metadata, directory, max_length=source.config["max_position_embeddings"])
    writer = CheckpointWriter(directory)
    for name, tensor in reporter.track(source.tensors(), total=len(source), label=f"Converting {path.name}"):
        writer.add(name, tensor.to(torch.bfloat16))
    writer.finish()
    named = ("general.name", "general.license", "general.architecture")
    return {name: source.metadata[name] for name in named if name in source.metadata}


def hf_name(name: str, architecture: Architecture) -> str:
    """Hugging Face name of a GGUF tensor. Raises Refused when there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER and kind == "weight":
        return f"{_OUTER[stem]}.weight"
    parts = _GEMMA_BLOCK if architecture.is_gemma else _BLOCK
    match = _BLOCK_NAME.match(name)
    if match is None or match["part"] not in parts:
        raise Refused(f"GGUF tensor {name!r} has no place in a {architecture.model_type} model.")
    return f"model.layers.{match['layer']}.{parts[match['part']]}.{match['kind']}"


def unpermuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order of rotary projections.

    [heads, head_size / 2, 2, ...] (neighbouring rows are a rotary pair) -> [heads, 2, head_size / 2, ...]
    (the halves of a head are the pairs), flattened again to [heads * head_size, ...].
    """
    half = values.shape[0] // num_heads // 2
    paired = values.reshape(num_heads, half, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _shape(tensor: Any) -> tuple[int, ...]:
    """GGUF lists the fastest axis first; torch lists it last."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    parsed = AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    return shapes


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
