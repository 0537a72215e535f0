"""Writing a checkpoint for TensorRT-LLM's PyTorch backend: Hugging Face's layout, ModelOpt's suffixes."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.tensorrt_fuse import share_scales
from bitsmith.compile.tensorrt_linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    SourceLinear,
    WeightOnlyLinear,
)
from bitsmith.compile.tensorrt_names import EMBEDDING, FINAL_NORM, HEAD, LINEARS, NORMS
from bitsmith.compile.tensorrt_quantization import W4A8_AWQ, W4A16_AWQ
from bitsmith.compile.tensorrt_rounding import INT8_MAX, relative_error
from bitsmith.compile.tensorrt_source import ExportSource
from bitsmith.compile.tensorrt_unified_plan import UnifiedPlan, needs_ones
from bitsmith.core.checkpoint_writer import CheckpointWriter
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.versions import installed_version
from bitsmith.quantize.int4_rows import pack_rows
from bitsmith.quantize.modelopt_config import QUANT_CONFIG_NAME

# The release of ModelOpt whose file format is followed; readers look at the producer's name.
_FORMAT = {"name": "modelopt", "version": "0.47.0"}
_FUSED = (LINEARS["attention.qkv"], (*LINEARS["mlp.fc"], *LINEARS["mlp.gate"]))


class UnifiedExport:
    """One export; `errors` holds the relative error of every module that had to be rounded again."""

    def __init__(self, source: ExportSource, plan: UnifiedPlan) -> None:
        self._source = source
        self._plan = plan
        self._dtype = source.tensor(f"{EMBEDDING}.weight").dtype
        self.errors: dict[str, float] = {}

    def write(self, directory: Path, reporter: Reporter) -> None:
        """Weights, config.json and, where something is quantized, hf_quant_config.json."""
        writer = CheckpointWriter(directory)
        for name in self._table_names():
            writer.add(name, self._source.tensor(name))
        if not self._plan.decoder.is_tied:
            head = self._source.linear(HEAD)
            weight = head.weight if isinstance(head, DenseLinear) else head.dequantize().to(self._dtype)
            writer.add(f"{HEAD}.weight", weight)
        num_layers = self._plan.decoder.num_layers
        for layer in reporter.track(range(num_layers), total=num_layers, label="Exporting layers"):
            self._write_layer(writer, layer)
        writer.finish()
        self._write_config(directory)

    def _table_names(self) -> list[str]:
        """Tensors that are copied as they are, except biases."""
        names = [f"{EMBEDDING}.weight", f"{FINAL_NORM}.weight"]
        for layer in range(self._plan.decoder.num_layers):
            names += [f"model.layers.{layer}.{norm}.weight" for norm in NORMS.values()]
        return [name for name in names if name in self._source]

    def _write_layer(self, writer: CheckpointWriter, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        for group in (*_FUSED, LINEARS["attention.dense"], LINEARS["mlp.proj"]):
            modules = [f"{prefix}.{part}" for part in group]
            for module, linear in zip(modules, self._group(modules), strict=True):
                for suffix, tensor in self._tensors(module, linear).items():
                    writer.add(f"{module}.{suffix}", tensor.clone())
                if f"{module}.bias" in self._source:
                    writer.add(f"{module}.bias", self._source.tensor(f"{module}.bias"))
        scales = self._source.kv_scales(layer)
        if self._plan.kv_algo is not None and scales is not None:
            # Not read by this backend; kept for the readers that do.
            writer.add(f"{prefix}.self_attn.k_proj.k_scale", torch.tensor(scales[0]))
            writer.add(f"{prefix}.self_attn.v_proj.v_scale", torch.tensor(scales[1]))

    def _group(self, modules: list[str]) -> list[SourceLinear]:
        linears = [self._source.linear(module) for module in modules]
        int4 = [linear for linear in linears if isinstance(linear, Int4Linear)]
        if self._plan.quant_algo != W4A8_AWQ or len(int4) != len(modules) or len(modules) == 1:
            return linears  # FP8 shards may differ: the loader takes the largest scale itself
        shared, errors = share_scales(int4, ", ".join(modules), is_one_layer=True)
        pairs = zip(modules, errors, strict=True)
        self.errors |= {module: error for module, error in pairs if error > 0}
        return list(shared)

    def _tensors(self, module: str, linear: SourceLinear) -> dict[str, Tensor]:
        if isinstance(linear, DenseLinear):
            return {"weight": linear.weight}
        if isinstance(linear, WeightOnlyLinear):
            return self._int8(module, linear)
        if isinstance(linear, Fp8Linear):
            scale = linear.scale.float()
            if linear.input_scale is None:
                return {"weight": linear.weight, "weight_scale": scale}
            return {
                "weight": linear.weight,
                "weight_scale": scale.reshape(()),
                "input_scale": linear.input_scale.float().reshape(()),
            }
        assert isinstance(linear, Int4Linear), module
        return self._int4(module, linear)

    def _int4(self, module: str, linear: Int4Linear) -> dict[str, Tensor]:
        leaf = module.rpartition(".")[2]
        packed = pack_rows(linear.values).view(torch.uint8)
        tensors = {"weight": packed, "weight_scale": linear.scale.float()}
        pre_quant = linear.pre_quant_scale
        if needs_ones(self._plan.quant_algo, leaf):
            ones = torch.ones(linear.values.shape[1], dtype=self._dtype)
            tensors["pre_quant_scale"] = ones if pre_quant is None else pre_quant.to(self._dtype)
        elif pre_quant is not None and not bool((pre_quant == 1).all()):
            raise Refused(
                f"{module} has a pre-quant scale, which this backend does not read for fused layers; fold it "
                "into the norm before it and quantize again."
            )
        if linear.input_scale is not None and linear.weight_scale_2 is not None:
            tensors["weight_scale_2"] = linear.weight_scale_2.float().reshape(())
            tensors["input_scale"] = linear.input_scale.float().reshape(())
        return tensors

    def _int8(self, module: str, linear: WeightOnlyLinear) -> dict[str, Tensor]:
        """One scale for each output channel: as it is, or rounded again to amax / 127."""
        if linear.is_per_channel:
            return {"weight": linear.values, "weight_scale": linear.scale.float().reshape(-1)}
        weight = linear.dequantize()
        scale = (weight.abs().amax(dim=1) / INT8_MAX).clamp_min(1e-12)
        values = torch.round(weight / scale.unsqueeze(1)).to(torch.int8)
        error = relative_error(values.float() * scale.unsqueeze(1), weight)
        if error > 0:
            self.errors[module] = error
        return {"weight": values, "weight_scale": scale}

    def _write_config(self, directory: Path) -> None:
        config = {key: value for key, value in self._source.config.items() if key != "quantization_config"}
        legacy, flat = quantization_sections(self._plan)
        if legacy is not None:
            body = {"producer": _FORMAT, "written_by": _written_by(), "quantization": legacy}
            text = json.dumps(body, indent=4) + "\n"
            (directory / QUANT_CONFIG_NAME).write_text(text, encoding="utf-8")
            config["quantization_config"] = flat
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _written_by() -> str:
    return f"bitsmith {installed_version('bitsmith')}"


def quantization_sections(plan: UnifiedPlan) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(section of hf_quant_config.json, flat form inside config.json); None where nothing is quantized.

    Older releases read the first form only, newer ones both.
    """
    if plan.quant_algo is None and plan.kv_algo is None:
        return None, None
    legacy: dict[str, Any] = {"quant_algo": plan.quant_algo, "kv_cache_quant_algo": plan.kv_algo}
    if plan.quant_algo in (W4A16_AWQ, W4A8_AWQ):
        legacy |= {"group_size": plan.group_size, "has_zero_point": False, "pre_quant_scale": True}
    legacy["exclude_modules"] = list(plan.excludes)
    flat: dict[str, Any] = {"quant_method": "modelopt", "ignore": list(plan.excludes), "producer": _FORMAT}
    if plan.quant_algo is not None:
        flat["quant_algo"] = plan.quant_algo
    if plan.kv_algo == "FP8":
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return legacy, flat
