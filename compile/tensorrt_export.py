"""Writing a TensorRT-LLM checkpoint from a plan: layer by layer, to all ranks at once."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bitsmith.compile.tensor_file import torch_dtype
from bitsmith.compile.tensorrt_checkpoint import CONFIG_NAME, rank_name
from bitsmith.compile.tensorrt_engine_config import engine_config
from bitsmith.compile.tensorrt_fuse import share_scales
from bitsmith.compile.tensorrt_layout import checkpoint_tensors, is_head_shared, module_name
from bitsmith.compile.tensorrt_linear import DenseLinear, Int4Linear, Linear, SourceLinear, WeightOnlyLinear
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    hf_linear_names,
    hf_norm_name,
    kv_scale_name,
)
from bitsmith.compile.tensorrt_plan import FUSED_GROUPS, ExportPlan
from bitsmith.compile.tensorrt_rank_writer import RankWriter
from bitsmith.compile.tensorrt_shard import (
    kv_row_index,
    query_row_index,
    row_index,
    shard_column,
    shard_embedding,
    shard_head,
    shard_qkv,
    shard_row,
)
from bitsmith.compile.tensorrt_source import ExportSource
from bitsmith.compile.tensorrt_tensors import to_tensors
from bitsmith.core.progress import Reporter

RelativeErrors = dict[str, float]  # Hugging Face module -> error of rounding it again


def engine_linear(linear: SourceLinear, dtype: torch.dtype) -> Linear:
    """Weight-only weights become plain ones: TensorRT-LLM rounds those itself when it builds."""
    return DenseLinear(linear.dequantize().to(dtype)) if isinstance(linear, WeightOnlyLinear) else linear


class CheckpointExport:
    """One export. Does not know where scales or calibration come from."""

    def __init__(self, source: ExportSource, plan: ExportPlan) -> None:
        self._source = source
        self._plan = plan
        self._model: EngineModel = plan.model
        self._dtype = torch_dtype(plan.model.dtype)
        self.errors: RelativeErrors = {}

    def write(self, directory: Path, reporter: Reporter) -> None:
        """config.json and one file for each rank."""
        model, plan = self._model, self._plan
        body = engine_config(plan.decoder, model, plan.release)
        (directory / CONFIG_NAME).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        with ExitStack() as stack:
            writers = [
                stack.enter_context(
                    RankWriter(directory / rank_name(rank), checkpoint_tensors(model, rank, plan.release))
                )
                for rank in range(model.world_size)
            ]
            self._write_tables(writers)
            layers = reporter.track(range(model.num_layers), total=model.num_layers, label="Exporting layers")
            for layer in layers:
                first = layer // model.layers_per_rank * model.tp_size
                self._write_layer(writers[first : first + model.tp_size], layer)

    def _write_tables(self, writers: list[RankWriter]) -> None:
        model = self._model
        embedding = self._source.tensor(f"{EMBEDDING}.weight").to(self._dtype)
        for tp_rank, writer in enumerate(writers[: model.tp_size]):
            shard = shard_embedding(embedding, model, tp_rank)
            writer.write("transformer.vocab_embedding.weight", shard)
        final_norm = self._norm(FINAL_NORM)
        head = self._head(embedding)
        for tp_rank, writer in enumerate(writers[-model.tp_size :]):
            writer.write("transformer.ln_f.weight", final_norm)
            if not is_head_shared(model):
                writer.write("lm_head.weight", shard_head(head, model, tp_rank))

    def _head(self, embedding: Tensor) -> Tensor:
        """The head, dequantized if need be; tied models get a copy of the embedding."""
        if self._plan.decoder.is_tied:
            return embedding
        head = self._source.linear(HEAD)
        return head.dequantize().to(self._dtype)

    def _norm(self, module: str) -> Tensor:
        weight = self._source.tensor(f"{module}.weight")
        # Gemma's norms multiply by 1 + weight; engines want the sum.
        return (weight.float() + 1.0).to(self._dtype) if self._model.is_gemma else weight.to(self._dtype)

    def _write_layer(self, writers: list[RankWriter], layer: int) -> None:
        model = self._model
        index = layer % model.layers_per_rank
        for norm, _ in model.norms():
            weight = self._norm(hf_norm_name(layer, norm))
            for writer in writers:
                writer.write(module_name(index, f"{norm}.weight"), weight)
        linears = self._linears(layer)
        for shape in model.linears():
            prefix = module_name(index, shape.name)
            parts = [self._complete(linear) for linear in linears[shape.name]]
            for tp_rank, writer in enumerate(writers):
                shard = self._shard(shape.name, parts, tp_rank)
                for suffix, tensor in to_tensors(shard, self._dtype).items():
                    writer.write(f"{prefix}.{suffix}", tensor)
                if shape.has_bias:
                    writer.write(f"{prefix}.bias", self._bias(layer, shape.name, tp_rank))
        if self._plan.kv.algo is not None:
            scale = torch.tensor([self._plan.kv.scales[layer]], dtype=torch.float32)
            for writer in writers:
                writer.write(kv_scale_name(index), scale)

    def _linears(self, layer: int) -> dict[str, list[Linear]]:
        """Name -> the parts of each linear, with the scales that fused ones share."""
        linears: dict[str, list[Linear]] = {}
        for group in (*FUSED_GROUPS, ("attention.dense",), ("mlp.proj",)):
            names = [part for name in group for part in hf_linear_names(layer, name)]
            parts = [engine_linear(self._source.linear(name), self._dtype) for name in names]
            if len(names) > 1:
                parts, errors = share_scales(parts, ", ".join(names), is_one_layer=len(group) == 1)
                pairs = zip(names, errors, strict=True)
                self.errors |= {name: error for name, error in pairs if error > 0}
            for name in group:
                count = len(hf_linear_names(layer, name))
                linears[name], parts = parts[:count], parts[count:]
        return linears

    def _complete(self, linear: Linear) -> Linear:
        """Neutral scales and zero points where the configuration promises them for every layer."""
        if not isinstance(linear, Int4Linear):
            return linear
        quant = self._model.quant
        if quant.pre_quant_scale and linear.pre_quant_scale is None:
            linear = replace(linear, pre_quant_scale=torch.ones(linear.values.shape[1], dtype=self._dtype))
        if quant.has_zero_point and linear.zero_point is None:
            linear = replace(linear, zero_point=torch.zeros(linear.scale.shape, dtype=torch.int8))
        return linear

    def _shard(self, name: str, parts: list[Linear], tp_rank: int) -> Linear:
        if name == "attention.qkv":
            return shard_qkv(parts, self._model, tp_rank)
        if name in ("mlp.fc", "mlp.gate"):
            return shard_column(parts[0], self._model.tp_size, tp_rank)
        return shard_row(parts[0], self._model.tp_size, tp_rank)

    def _bias(self, layer: int, name: str, tp_rank: int) -> Tensor:
        """Column-parallel biases are cut; row-parallel ones stand whole on every rank."""
        model = self._model
        biases = [self._source.tensor(f"{part}.bias") for part in hf_linear_names(layer, name)]
        if name == "attention.qkv":
            kv_rows = kv_row_index(model, tp_rank)
            index = (query_row_index(model, tp_rank), kv_rows, kv_rows)
            cut = [bias[rows] for bias, rows in zip(biases, index, strict=True)]
            return torch.cat(cut).to(self._dtype)
        bias = biases[0].to(self._dtype)
        is_column = name in ("mlp.fc", "mlp.gate")
        return bias[row_index(bias.shape[0], model.tp_size, tp_rank)] if is_column else bias
