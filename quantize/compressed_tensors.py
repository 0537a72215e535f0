"""The compressed-tensors format: packed integers (`pack-quantized`), and `quantization_config` of any.

Names and layout are those that compressed-tensors 0.20 reads and writes, so that transformers, vLLM and
others load what is written here. Not known here: where weights come from, which files they go to.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import KVCacheScheme
from bitsmith.quantize.compressed_float import FLOAT_QUANTIZED, FLOAT_SUFFIXES, store_fp8
from bitsmith.quantize.compressed_inputs import eight_bit_args
from bitsmith.quantize.compressed_int import INT_QUANTIZED, store_int8
from bitsmith.quantize.fp8_weight import Fp8Weight
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.kv_scales import ScaledKVCache
from bitsmith.quantize.packing import PACKABLE_BITS, num_words, pack_int32, unpack_int32
from bitsmith.quantize.weight import QuantizedWeight

PACKED_FORMAT = "pack-quantized"
PACKED_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
_WEIGHT_SUFFIXES = {*PACKED_SUFFIXES, *FLOAT_SUFFIXES}
_KV_SUFFIXES = ("self_attn.k_scale", "self_attn.v_scale")
# KV-cache types, and what the format calls their numbers.
_KV_TYPES: dict[ScaledKVCache, str] = {"fp8": "float", "int8": "int"}


def pack_weight(module_name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """State-dict entries of one quantized module. The scale keeps its dtype."""
    entries = {
        f"{module_name}.weight_packed": pack_int32(weight.values, weight.num_bits),
        f"{module_name}.weight_scale": weight.scale.contiguous(),
        f"{module_name}.weight_shape": torch.tensor(weight.values.shape, dtype=torch.int64),
    }
    if weight.zero_point is not None:
        # Zero points are packed along the output axis: [out, num_groups] -> [words(out), num_groups].
        packed = pack_int32(weight.zero_point, weight.num_bits, dim=0)
        entries[f"{module_name}.weight_zero_point"] = packed
    return entries


def store_weight(module_name: str, weight: QuantizedWeight | Int8Weight | Fp8Weight) -> dict[str, Tensor]:
    """State-dict entries of one quantized module, in the format of its kind."""
    if isinstance(weight, Fp8Weight):
        return store_fp8(module_name, weight)
    if isinstance(weight, Int8Weight):
        return store_int8(module_name, weight)
    return pack_weight(module_name, weight)


def is_packed(module_name: str, names: Mapping[str, Any] | Sequence[str]) -> bool:
    return f"{module_name}.weight_packed" in names


def unpack_weight(
    module_name: str, read: Callable[[str], Tensor], has: Callable[[str], bool], bits: Sequence[int]
) -> QuantizedWeight:
    """Inverse of `pack_weight`. bits: the widths that the configuration declares for its groups."""
    if has(f"{module_name}.weight_g_idx"):
        raise Refused(
            f"{module_name} has weight_g_idx (dynamic act-order); only static act-order can be read. "
            "Quantize the model again with static groups."
        )
    packed, scale = read(f"{module_name}.weight_packed"), read(f"{module_name}.weight_scale")
    num_rows, num_columns = (int(size) for size in read(f"{module_name}.weight_shape"))
    widths = [width for width in bits if num_words(num_columns, width) == packed.shape[1]]
    if (
        not widths
        or packed.shape[0] != num_rows
        or scale.shape[0] != num_rows
        or num_columns % scale.shape[1]
    ):
        raise Refused(
            f"{module_name}: weight_packed {list(packed.shape)}, weight_scale {list(scale.shape)} and "
            f"weight_shape [{num_rows}, {num_columns}] do not belong together."
        )
    zero_point = None
    if has(f"{module_name}.weight_zero_point"):
        packed_zero_point = read(f"{module_name}.weight_zero_point")
        zero_point = unpack_int32(packed_zero_point, widths[0], num_rows, dim=0)
    values = unpack_int32(packed, widths[0], num_columns)
    return QuantizedWeight(values, scale, zero_point, widths[0], num_columns // scale.shape[1])


def dense_name(name: str) -> str | None:
    """State-dict name after dequantization of a stored name; None for one that has no counterpart."""
    module_name, _, suffix = name.rpartition(".")
    if suffix == "weight_packed":
        return f"{module_name}.weight"
    if suffix in _WEIGHT_SUFFIXES or name.endswith(_KV_SUFFIXES):
        return None
    return name


def kv_scale_names(prefix: str) -> tuple[str, str]:
    """Names of a layer's KV-cache scales; prefix: the layer's own name."""
    key, value = (f"{prefix}.{suffix}" for suffix in _KV_SUFFIXES)
    return key, value


def weight_args(num_bits: int, group_size: int | None, symmetric: bool, act_order: bool) -> dict[str, Any]:
    """The `weights` entry of a config group. group_size None: one scale for each output channel."""
    return {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": "weight" if act_order else None,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }


def quantization_config(
    weights: Mapping[str, Any] | None,
    ignore: Sequence[str],
    kv_cache: KVCacheScheme,
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`quantization_config` for config.json. weights None: the weights stay dense. inputs: theirs."""
    groups = [] if weights is None else [WeightGroup(["Linear"], weights)]
    return grouped_config(groups, ignore, kv_cache, inputs)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """targets: names of modules, or of a class of modules. weights: as `weight_args` gives them."""

    targets: Sequence[str]
    weights: Mapping[str, Any]


def grouped_config(
    groups: Sequence[WeightGroup],
    ignore: Sequence[str],
    kv_cache: KVCacheScheme,
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The same of modules that are stored in several ways."""
    form = PACKED_FORMAT
    if inputs is not None:
        form = (FLOAT_QUANTIZED if inputs["type"] == "float" else INT_QUANTIZED).format
    return {
        "quant_method": "compressed-tensors",
        "format": form if groups else "dense",
        "quantization_status": "compressed" if groups else "frozen",
        "config_groups": {
            f"group_{index}": {
                "targets": list(group.targets),
                "weights": group.weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": form,
            }
            for index, group in enumerate(groups)
        },
        "ignore": list(ignore),
        "kv_cache_scheme": _kv_cache_args(kv_cache),
        "global_compression_ratio": None,
    }


def _kv_cache_args(kv_cache: KVCacheScheme) -> dict[str, Any] | None:
    return None if kv_cache == "none" else eight_bit_args(_KV_TYPES[kv_cache], "tensor", dynamic=False)


@dataclass(frozen=True, slots=True)
class DeclaredBits:
    """Widths of packed integer weights, by the targets of config groups: names of modules, `re:` and a
    pattern of names, or a class of modules."""

    by_target: Mapping[str, int]

    def of(self, module: str) -> tuple[int, ...]:
        """What the module may have: its own group's width, else those of classes. A name goes before a
        pattern."""
        if module in self.by_target:
            return (self.by_target[module],)
        for target, num_bits in self.by_target.items():
            if target.startswith("re:") and re.match(target.removeprefix("re:"), module):
                return (num_bits,)
        return tuple(dict.fromkeys(self.by_target.values()))


def declared_bits(config: Mapping[str, Any]) -> DeclaredBits:
    """What a checkpoint's config.json declares; no targets for a dense one.

    Raises Refused, naming what is not understood, for another method, format or kind of quantization.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return DeclaredBits({})
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        raise Refused(
            f"The checkpoint is quantized with {method!r}; compressed-tensors, gptq, awq and modelopt can be "
            "read."
        )
    others = (FLOAT_QUANTIZED.format, INT_QUANTIZED.format)
    packed = {
        name: group
        for name, group in (quantization.get("config_groups") or {}).items()
        if (group.get("format") or quantization.get("format")) not in others
    }
    return DeclaredBits(
        {
            target: num_bits
            for name, group in packed.items()
            for num_bits in [_group_bits(name, group, quantization)]
            for target in group.get("targets") or ["Linear"]
        }
    )


def _group_bits(name: str, group: Mapping[str, Any], quantization: Mapping[str, Any]) -> int:
    weights = group.get("weights") or {}
    format_name = group.get("format") or quantization.get("format")
    if format_name != PACKED_FORMAT:
        raise Refused(
            f"Config group {name} has format {format_name!r}; "
            f"{PACKED_FORMAT!r}, {INT_QUANTIZED.format!r} and {FLOAT_QUANTIZED.format!r} can be read."
        )
    if group.get("input_activations") or group.get("output_activations"):
        raise Refused(f"Config group {name} quantizes activations; only quantized weights can be read.")
    if weights.get("type") != "int" or weights.get("num_bits") not in PACKABLE_BITS:
        raise Refused(
            f"Config group {name} has {weights.get('type')} weights of {weights.get('num_bits')} bits; "
            f"integers of {', '.join(map(str, PACKABLE_BITS))} bits can be read."
        )
    return int(weights["num_bits"])


def declared_kv_cache(config: Mapping[str, Any]) -> KVCacheScheme:
    """KV-cache type that a checkpoint's config.json declares. Raises Refused for one that is not known."""
    args = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if args is None:
        return "none"
    is_static = args.get("symmetric", True) and not args.get("dynamic", False)
    if is_static and (args.get("num_bits"), args.get("strategy")) == (8, "tensor"):
        for kv_cache, number_type in _KV_TYPES.items():
            if args.get("type") == number_type:
                return kv_cache
    raise Refused(
        f"The checkpoint declares a KV cache of {args.get('type')} {args.get('num_bits')} bits per "
        f"{args.get('strategy')}{'' if is_static else ', with zero points or dynamic scales'}; FP8 and INT8 "
        "with a static symmetric scale per tensor can be read."
    )
