"""From a checkpoint's weights to the decoder's packed tensors, one module at a time.

Rows of q, k, v (and of gate, up) become one product when they are stored alike: fewer, larger products
read the same activations once. Not known here: how a layout looks inside (`ops.packing` does).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsmith.compile.decoder import rotary_tensors
from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.compile.decoder_plan import Activations, HeadType, LinearSpec
from bitsmith.compile.lm_head import rounded_head
from bitsmith.compile.packing_fp8 import fuse_fp8_rows, pack_fp8_part
from bitsmith.compile.packing_int import fuse_int8_rows, fuse_integer_rows, pack_integer_part
from bitsmith.core.errors import Refused
from bitsmith.ops.packing import pack_dense
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.reordered_weight import ReorderedWeight
from bitsmith.quantize.smoothed_weight import SmoothedWeight
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import WeightSource

Weight = QuantizedWeight | Int8Weight | Fp8Weight | Tensor


@dataclass(frozen=True, slots=True)
class PackedModule:
    """What one module of the decoder needs: tensors by name, and for a linear module its products."""

    name: str
    tensors: dict[str, Tensor]
    specs: tuple[LinearSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class _LinearNames:
    """A joined linear module of the decoder, and the checkpoint's modules behind it."""

    name: str
    sources: tuple[str, ...]
    has_bias: bool


def num_modules(config: DecoderConfig) -> int:
    """How many PackedModules `pack_modules` yields."""
    return 3 + config.num_layers * 5


def pack_modules(
    source: WeightSource, config: DecoderConfig, activations: Activations, lm_head: HeadType = "checkpoint"
) -> Iterator[PackedModule]:
    """Every module of the decoder in the order in which a step reads it."""
    embedding = _dense(source.tensor("model.embed_tokens.weight"), activations)
    yield PackedModule("embedding", {"embedding": embedding})
    for layer_index in range(config.num_layers):
        yield _pack_norms(source, config, layer_index)
        for linear in _layer_linears(config, layer_index):
            yield _pack_linear(source, linear, activations)
    yield _pack_head(source, config, activations, lm_head)
    final_norm = _norm_weight(source, config, "model.norm.weight")
    yield PackedModule("final", {"final_norm.weight": final_norm} | rotary_tensors(config))


def expected_names(config: DecoderConfig) -> set[str]:
    """State-dict names that a checkpoint of this configuration has; a tied head may be left out."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config.is_tied:
        names.add("lm_head.weight")
    for layer_index in range(config.num_layers):
        names |= {f"model.layers.{layer_index}.{stored}.weight" for stored in _norm_names(config).values()}
        for linear in _layer_linears(config, layer_index):
            names |= {f"{module}.weight" for module in linear.sources}
            if linear.has_bias:
                names |= {f"{module}.bias" for module in linear.sources}
    return names


def check_names(source: WeightSource, config: DecoderConfig) -> None:
    """Refuse a checkpoint that lacks a weight, or holds one that this decoder would not use."""
    expected, present = expected_names(config), set(source.names)
    missing = sorted(expected - present)
    if missing:
        raise Refused(f"{source.path}: {len(missing)} weights are missing, the first is {missing[0]}.")
    unused = sorted(
        name
        for name in present - expected
        if not name.endswith("rotary_emb.inv_freq") and not (config.is_tied and name == "lm_head.weight")
    )
    if unused:
        raise Refused(
            f"{source.path}: {len(unused)} weights have no place in a {config.model_type} decoder, "
            f"the first is {unused[0]}."
        )


def _layer_linears(config: DecoderConfig, layer_index: int) -> tuple[_LinearNames, ...]:
    attention, mlp = (f"model.layers.{layer_index}.{part}" for part in ("self_attn", "mlp"))
    qkv = ("qkv_proj",) if config.is_fused else ("q_proj", "k_proj", "v_proj")
    gate_up = ("gate_up_proj",) if config.is_fused else ("gate_proj", "up_proj")
    name = f"layers.{layer_index}"
    return (
        _LinearNames(f"{name}.qkv", tuple(f"{attention}.{part}" for part in qkv), config.qkv_bias),
        _LinearNames(f"{name}.output", (f"{attention}.o_proj",), config.output_bias),
        _LinearNames(f"{name}.gate_up", tuple(f"{mlp}.{part}" for part in gate_up), config.mlp_bias),
        _LinearNames(f"{name}.down", (f"{mlp}.down_proj",), config.mlp_bias),
    )


def _norm_names(config: DecoderConfig) -> dict[str, str]:
    """Norm in the decoder -> norm in the checkpoint. Gemma gives Llama's names other places."""
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.post_norms:
        names |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    if config.qk_norm:
        names |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    return names


def _pack_head(
    source: WeightSource, config: DecoderConfig, activations: Activations, lm_head: HeadType
) -> PackedModule:
    module = "model.embed_tokens" if config.is_tied else "lm_head"
    if lm_head == "int8":
        tensors: dict[str, Tensor] = {}
        spec = _pack_part("head.0", rounded_head(source.linear(module)), activations, False, tensors)
        return PackedModule("head", tensors, (spec,))
    packed = _pack_linear(source, _LinearNames("head", (module,), False), activations)
    is_shared = config.is_tied and not packed.specs[0].is_quantized
    return PackedModule(packed.name, {}, packed.specs) if is_shared else packed


def _pack_norms(source: WeightSource, config: DecoderConfig, layer_index: int) -> PackedModule:
    name, stored_name = f"layers.{layer_index}", f"model.layers.{layer_index}"
    norms = {
        part: _norm_weight(source, config, f"{stored_name}.{stored}.weight")
        for part, stored in _norm_names(config).items()
    }
    if config.qk_norm:
        # One norm for query and key heads together: [num_heads + num_kv_heads, head_size].
        query = norms.pop("query_norm").expand(config.num_heads, -1)
        key = norms.pop("key_norm").expand(config.num_kv_heads, -1)
        norms["head_norm"] = torch.cat((query, key))
    return PackedModule(f"{name}.norms", {f"{name}.{part}.weight": norm for part, norm in norms.items()})


def _norm_weight(source: WeightSource, config: DecoderConfig, name: str) -> Tensor:
    weight = source.tensor(name).float()
    return weight + 1.0 if config.norm_plus_one else weight


def engine_weight(source: WeightSource, module: str) -> Weight:
    """Raises Refused for a weight whose inputs must be multiplied, or put in another order, first."""
    weight = source.linear(module)
    if isinstance(weight, SmoothedWeight):
        raise Refused(
            f"{source.path}: {module} has a pre_quant_scale for its inputs (AWQ or SmoothQuant by ModelOpt), "
            "which the native engine does not apply. Use --target tensorrt-llm or tensorrt-llm-pytorch, or "
            "another scheme."
        )
    if isinstance(weight, ReorderedWeight):
        raise Refused(
            f"{source.path}: {module} has groups of columns that are not neighbours (g_idx of GPTQ's "
            "act-order without static groups), which the native engine does not read. Quantize it again with "
            "static groups, as `bitsmith quantize` does."
        )
    return weight


def _pack_linear(source: WeightSource, names: _LinearNames, activations: Activations) -> PackedModule:
    weights = [engine_weight(source, module) for module in names.sources]
    biases = [source.tensor(f"{module}.bias").float() for module in names.sources if names.has_bias]
    fused = _fuse_rows(weights)
    if fused is not None:
        weights, biases = [fused], [torch.cat(biases)] if biases else []
    tensors: dict[str, Tensor] = {}
    specs = []
    for index, weight in enumerate(weights):
        part = f"{names.name}.{index}"
        specs.append(_pack_part(part, weight, activations, names.has_bias, tensors))
        if names.has_bias:
            tensors[f"{part}.bias"] = biases[index]
    return PackedModule(names.name, tensors, tuple(specs))


def _pack_part(
    part: str, weight: Weight, activations: Activations, has_bias: bool, tensors: dict[str, Tensor]
) -> LinearSpec:
    """Pack one product's weight into `tensors`; returns its shape and arithmetic."""
    if isinstance(weight, Fp8Weight):
        return pack_fp8_part(part, weight, activations, has_bias, tensors)
    if isinstance(weight, QuantizedWeight | Int8Weight):
        return pack_integer_part(part, weight, activations, has_bias, tensors)
    dense = _dense(weight, activations)
    tensors[f"{part}.weight"] = pack_dense(dense)
    arithmetic: Activations = "bf16" if activations in ("int8", "fp8") else activations
    num_rows, num_columns = dense.shape
    return LinearSpec(num_columns, num_rows, dense.dtype.itemsize * 8, 0, arithmetic, has_bias, False)


def _dense(tensor: Tensor, activations: Activations) -> Tensor:
    """bf16 as it is; other types in fp32 for fp32 arithmetic, else rounded to bf16."""
    keeps_type = tensor.dtype == torch.bfloat16
    return tensor if keeps_type else tensor.to(torch.float32 if activations == "fp32" else torch.bfloat16)


def _fuse_rows(weights: Sequence[Weight]) -> Weight | None:
    """One weight of all rows, or None where the parts are not stored alike."""
    if len(weights) == 1:
        return weights[0]
    if all(isinstance(weight, Tensor) for weight in weights):
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        return torch.cat(dense) if len({weight.dtype for weight in dense}) == 1 else None
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    if len(fp8) == len(weights):
        return fuse_fp8_rows(fp8)
    int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(int8) == len(weights):
        return fuse_int8_rows(int8)
    integers = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    return fuse_integer_rows(integers) if len(integers) == len(weights) else None
