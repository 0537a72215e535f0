"""A TensorRT-LLM checkpoint on disk: configuration and rank files, opened without reading tensors."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.tensor_file import TensorFile, open_tensor_file
from bitsmith.compile.tensorrt_config import read_model
from bitsmith.compile.tensorrt_layout import module_algo, module_name
from bitsmith.compile.tensorrt_linear import Linear
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    hf_linear_names,
    hf_norm_name,
)
from bitsmith.compile.tensorrt_release import Release
from bitsmith.compile.tensorrt_shard import join_embedding, join_kv, split_qkv_rows
from bitsmith.compile.tensorrt_tensors import from_tensors
from bitsmith.core.errors import Refused

CONFIG_NAME = "config.json"


def rank_name(rank: int) -> str:
    return f"rank{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class EngineCheckpoint:
    """ranks: one file for each rank, pipeline stage by pipeline stage."""

    path: Path
    model: EngineModel
    release: Release
    ranks: tuple[TensorFile, ...]

    def stage(self, pp_rank: int) -> tuple[TensorFile, ...]:
        """The tensor-parallel ranks of one pipeline stage."""
        size = self.model.tp_size
        return self.ranks[pp_rank * size : (pp_rank + 1) * size]

    def linear(self, rank: int, layer: int, name: str) -> Linear:
        """A rank's linear. layer: index in the whole model."""
        prefix = f"{module_name(layer % self.model.layers_per_rank, name)}."
        file = self.ranks[rank]
        tensors = {
            key.removeprefix(prefix): file.tensor(key) for key in file.header if key.startswith(prefix)
        }
        return from_tensors(tensors, module_algo(self.model, layer, name, self.release))

    def dequantized_linears(
        self, layer: int, name: str, alteration: Callable[[Linear], Linear] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face module name, whole weight [out, in] fp32) of each linear fused into this one.

        alteration: applied to each rank's linear before it is turned back.
        """
        model = self.model
        first = layer // model.layers_per_rank * model.tp_size
        stored = [self.linear(rank, layer, name) for rank in range(first, first + model.tp_size)]
        shards = [(alteration(shard) if alteration else shard).dequantize() for shard in stored]
        hf_names = hf_linear_names(layer, name)
        if name == "attention.qkv":
            cut = [split_qkv_rows(shard, model) for shard in shards]
            yield hf_names[0], torch.cat([query for query, _, _ in cut])
            yield hf_names[1], join_kv([key for _, key, _ in cut], model)
            yield hf_names[2], join_kv([value for _, _, value in cut], model)
        elif name in ("mlp.fc", "mlp.gate"):
            yield hf_names[0], torch.cat(shards)
        else:
            yield hf_names[0], torch.cat(shards, dim=1)

    @property
    def _norm_offset(self) -> float:
        """Gemma's norms multiply by 1 + weight, and checkpoints here hold the sum."""
        return 1.0 if self.model.is_gemma else 0.0

    def dequantized(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face state-dict name, fp32 tensor): embeddings, norms, linears and biases."""
        yield from self.tables()
        model = self.model
        for layer in range(model.num_layers):
            file = self.stage(layer // model.layers_per_rank)[0]
            index = layer % model.layers_per_rank
            for norm, _ in model.norms():
                weight = file.tensor(module_name(index, f"{norm}.weight")).float()
                yield f"{hf_norm_name(layer, norm)}.weight", weight - self._norm_offset
            for linear in model.linears():
                for hf_name, real in self.dequantized_linears(layer, linear.name):
                    yield f"{hf_name}.weight", real
                if linear.has_bias:
                    yield from self._biases(layer, linear.name)

    def _biases(self, layer: int, name: str) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        key = module_name(layer % model.layers_per_rank, f"{name}.bias")
        shards = [file.tensor(key).float() for file in self.stage(layer // model.layers_per_rank)]
        hf_names = hf_linear_names(layer, name)
        if name == "attention.qkv":
            cut = [split_qkv_rows(shard, model) for shard in shards]
            yield f"{hf_names[0]}.bias", torch.cat([query for query, _, _ in cut])
            yield f"{hf_names[1]}.bias", join_kv([key for _, key, _ in cut], model)
            yield f"{hf_names[2]}.bias", join_kv([value for _, _, value in cut], model)
        else:
            is_column = name in ("mlp.fc", "mlp.gate")
            yield f"{hf_names[0]}.bias", torch.cat(shards) if is_column else shards[0]

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        """Embedding, final norm and, where the file has one, the head; padding removed."""
        model = self.model
        shards = [file.tensor("transformer.vocab_embedding.weight") for file in self.stage(0)]
        yield f"{EMBEDDING}.weight", join_embedding(shards, model).float()
        last = self.stage(model.pp_size - 1)
        yield f"{FINAL_NORM}.weight", last[0].tensor("transformer.ln_f.weight").float() - self._norm_offset
        if "lm_head.weight" in last[0].header:
            head = torch.cat([file.tensor("lm_head.weight") for file in last])[: model.vocab_size]
            yield f"{HEAD}.weight", head.float()


def read_config(path: Path) -> dict[str, Any]:
    """Raises Refused when there is no JSON object."""
    file = path / CONFIG_NAME
    try:
        body = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read as JSON ({error}).") from error
    if not isinstance(body, dict):
        raise Refused(f"{file} must hold a JSON object.")
    return body


def open_checkpoint(path: Path, release: Release) -> EngineCheckpoint:
    """Raises Refused when the configuration or a rank file is broken; says nothing of what they hold."""
    model, findings = read_model(read_config(path), release)
    if model is None:
        raise Refused(f"{path}: {findings[0].where} {findings[0].text}")
    ranks = tuple(open_tensor_file(path / rank_name(rank)) for rank in range(model.world_size))
    return EngineCheckpoint(path, model, release, ranks)
