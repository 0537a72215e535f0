"""Reading compressed-tensors checkpoints for TensorRT-LLM: packed integers, FP8 and INT8 weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.tensorrt_linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    SourceLinear,
    WeightOnlyLinear,
)
from bitsmith.compile.tensorrt_quantization import FP8, FP8_ROWWISE, SQ_PER_CHANNEL, W4A16_AWQ, W8A16
from bitsmith.compile.tensorrt_source_scheme import SourceScheme
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.quantize.compressed_tensors import PACKED_FORMAT, is_packed, kv_scale_names, unpack_weight

_UNPACKED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class CompressedTensorsSource:
    """One config group that all its quantized linears share; a module without a scale is dense."""

    reader: CheckpointReader
    scheme: SourceScheme = field(init=False)
    num_bits: int = field(init=False)

    def __post_init__(self) -> None:
        weights, scheme = _read_scheme(self.reader)
        object.__setattr__(self, "scheme", scheme)
        object.__setattr__(self, "num_bits", int(weights.get("num_bits", 16)))

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.reader.config

    def __contains__(self, name: object) -> bool:
        return name in self.reader

    def tensor(self, name: str) -> Tensor:
        return self.reader.tensor(name)

    def is_quantized(self, module: str) -> bool:
        return f"{module}.weight_scale" in self.reader

    def linear(self, module: str) -> SourceLinear:
        if is_packed(module, self.reader.names):
            return self._packed(module)
        weight = self.reader.tensor(f"{module}.weight")
        if f"{module}.weight_scale" not in self.reader:
            return DenseLinear(weight)
        scale = self.reader.tensor(f"{module}.weight_scale").float().reshape(-1)
        input_scale = self._input_scale(module)
        if self.scheme.quant_algo in (FP8, FP8_ROWWISE):
            return Fp8Linear(weight, scale, input_scale)
        assert input_scale is not None
        ones = torch.ones(weight.shape[1], dtype=self.reader.dtype("model.embed_tokens.weight"))
        return Int8Linear(weight, scale.expand(weight.shape[0]), input_scale, ones)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        names = kv_scale_names(f"model.layers.{layer}")
        if any(name not in self.reader for name in names):
            return None
        key, value = (float(self.reader.tensor(name).reshape(-1)[0]) for name in names)
        return key, value

    def _packed(self, module: str) -> SourceLinear:
        weight = unpack_weight(module, self.reader.tensor, lambda name: name in self.reader, (self.num_bits,))
        if self.num_bits == 8:
            return WeightOnlyLinear(weight.values, weight.scale, weight.zero_point)
        return Int4Linear(weight.values, weight.scale, weight.zero_point)

    def _input_scale(self, module: str) -> Tensor | None:
        if self.scheme.quant_algo == FP8_ROWWISE:
            return None
        name = f"{module}.input_scale"
        if name not in self.reader:
            raise Refused(f"{self.path}: {module} has no input_scale; static activations need one.")
        return self.reader.tensor(name).float().reshape(1)


def _read_scheme(reader: CheckpointReader) -> tuple[Mapping[str, Any], SourceScheme]:
    quantization = reader.config["quantization_config"]
    kv_algo = _kv_algo(reader, quantization)
    groups = [group for group in (quantization.get("config_groups") or {}).values() if group.get("weights")]
    if not groups:
        return {}, SourceScheme(kv_algo=kv_algo)
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    if any((group["weights"], group.get("input_activations")) != (weights, inputs) for group in groups):
        raise Refused(
            f"{reader.path} quantizes its modules in several ways; TensorRT-LLM's checkpoints here have one. "
            "Quantize all selected modules alike."
        )
    form = groups[0].get("format") or quantization.get("format")
    if form == PACKED_FORMAT and inputs is None:
        return weights, _packed_scheme(reader, weights, kv_algo)
    if form in _UNPACKED_FORMATS:
        return weights, _unpacked_scheme(reader, weights, inputs or {}, kv_algo)
    raise Refused(f"{reader.path}: format {form!r} cannot be exported to TensorRT-LLM.")


def _kv_algo(reader: CheckpointReader, quantization: Mapping[str, Any]) -> str | None:
    args = quantization.get("kv_cache_scheme")
    if args is None:
        return None
    kinds = {("float", 8): "FP8", ("int", 8): "INT8"}
    kind = kinds.get((args.get("type"), args.get("num_bits")))
    is_static = args.get("symmetric", True) and not args.get("dynamic", False)
    if kind is None or not is_static or args.get("strategy", "tensor") != "tensor":
        raise Refused(
            f"{reader.path}: KV cache {args} is neither FP8 nor INT8 with one static symmetric scale."
        )
    return kind


def _packed_scheme(reader: CheckpointReader, weights: Mapping[str, Any], kv_algo: str | None) -> SourceScheme:
    num_bits = weights.get("num_bits")
    if weights.get("type") != "int" or num_bits not in (4, 8):
        raise Refused(
            f"{reader.path}: {weights.get('type')} weights of {num_bits} bits are not exported; 4 and 8 are."
        )
    if num_bits == 8:
        return SourceScheme(W8A16, kv_algo)
    if weights.get("strategy") != "group":
        raise Refused(
            f"{reader.path} has one 4-bit scale per channel; TensorRT-LLM's group-wise kernels need groups "
            "of 64 or 128. Quantize again with --group-size 128."
        )
    _refuse_negative_scales(reader)
    return SourceScheme(W4A16_AWQ, kv_algo, int(weights["group_size"]), bool(weights.get("symmetric", True)))


def _refuse_negative_scales(reader: CheckpointReader) -> None:
    """TensorRT-LLM's scales are amax over the end of the grid; our own search may turn a grid around."""
    for name in reader.names:
        if name.endswith(".weight_scale") and bool((reader.tensor(name) < 0).any()):
            raise Refused(
                f"{reader.path}: {name} has negative scales, which TensorRT-LLM does not take. "
                "Quantize again with --for tensorrt-llm (or tensorrt-llm-pytorch)."
            )


def _unpacked_scheme(
    reader: CheckpointReader, weights: Mapping[str, Any], inputs: Mapping[str, Any], kv_algo: str | None
) -> SourceScheme:
    kind: tuple[Any, Any, Any, bool]
    kind = (weights.get("type"), weights.get("strategy"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    algos: dict[tuple[Any, Any, Any, bool], str] = {
        ("float", "tensor", "tensor", False): FP8,
        ("float", "channel", "token", True): FP8_ROWWISE,
        ("int", "channel", "tensor", False): SQ_PER_CHANNEL,
        ("int", "tensor", "tensor", False): SQ_PER_CHANNEL,
    }
    algo = algos.get(kind)
    if algo is None or weights.get("num_bits") != 8 or inputs.get("num_bits") != 8:
        raise Refused(
            f"{reader.path}: {weights.get('type')}{weights.get('num_bits')} weights per "
            f"{weights.get('strategy')} with {'dynamic' if kind[3] else 'static'} inputs per "
            f"{inputs.get('strategy')} have no TensorRT-LLM mode here. Known: FP8 per tensor static, FP8 per "
            "channel with dynamic tokens, INT8 per channel static."
        )
    return SourceScheme(algo, kv_algo)
