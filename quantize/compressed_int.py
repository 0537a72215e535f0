"""The compressed-tensors `int-quantized` format: INT8 weights and how their inputs are rounded.

Names and layout are those that compressed-tensors 0.20 reads and writes. Not known here: files.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.weight import QuantizedWeight

INT_FORMAT = "int-quantized"


def store_int8(module_name: str, weight: Int8Weight) -> dict[str, Tensor]:
    """State-dict entries of one module: `weight` I8, `weight_scale` [out, 1], `input_scale` F32 [1]."""
    entries = {
        f"{module_name}.weight": weight.integers.values,
        f"{module_name}.weight_scale": weight.integers.scale.contiguous(),
    }
    if weight.input_scale is not None:
        entries[f"{module_name}.input_scale"] = torch.tensor([weight.input_scale])
    return entries


def load_int8(module_name: str, read: Callable[[str], Tensor], activations: ActivationScale) -> Int8Weight:
    """Inverse of `store_int8`. activations: what the configuration declares. Raises Refused."""
    values, scale = read(f"{module_name}.weight"), read(f"{module_name}.weight_scale")
    if values.dtype != torch.int8 or values.dim() != 2:
        raise Refused(f"{module_name}.weight is {values.dtype} {list(values.shape)}; expected I8 [out, in].")
    if scale.numel() not in (1, values.shape[0]) or not bool(torch.isfinite(scale).all()):
        raise Refused(
            f"{module_name}: weight_scale {list(scale.shape)} must hold one finite number for each of the "
            f"{values.shape[0]} output channels, or one for all."
        )
    input_scale = None
    if activations == "tensor":
        stored = read(f"{module_name}.input_scale").float()
        if stored.numel() != 1 or not 0.0 < float(stored) < float("inf"):
            raise Refused(f"{module_name}: input_scale is {stored.tolist()}; it must be one positive number.")
        input_scale = float(stored)
    rows = scale.reshape(-1, 1).expand(values.shape[0], 1).contiguous()
    return Int8Weight(QuantizedWeight(values, rows, None, 8, values.shape[1]), input_scale)


def int8_weight_args() -> dict[str, Any]:
    """The `weights` entry of a config group."""
    return _args("channel", dynamic=False)


def int8_input_args(activations: ActivationScale) -> dict[str, Any]:
    """The `input_activations` entry of a config group."""
    return _args(activations, dynamic=activations == "token")


def _args(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }


def declared_int8(config: Mapping[str, Any]) -> ActivationScale | None:
    """How a checkpoint's INT8 modules round their inputs; None where it declares none.

    Raises Refused for a kind that is not known, or for several kinds.
    """
    quantization = config.get("quantization_config") or {}
    groups = (quantization.get("config_groups") or {}).items()
    kinds = {
        _group_activations(name, group)
        for name, group in groups
        if (group.get("format") or quantization.get("format")) == INT_FORMAT
    }
    if len(kinds) > 1:
        raise Refused(
            "The checkpoint has INT8 modules with static and with dynamic inputs; one kind can be read."
        )
    return next(iter(kinds), None)


def _group_activations(name: str, group: Mapping[str, Any]) -> ActivationScale:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    kinds: dict[tuple[Any, bool], ActivationScale] = {("tensor", False): "tensor", ("token", True): "token"}
    activations = kinds.get((inputs.get("strategy"), bool(inputs.get("dynamic"))))
    is_int8 = all(
        (args.get("type"), args.get("num_bits"), args.get("symmetric", True)) == ("int", 8, True)
        for args in (weights, inputs)
    )
    if not is_int8 or weights.get("strategy") not in ("tensor", "channel") or activations is None:
        raise Refused(
            f"Config group {name} has {weights.get('type')} weights of {weights.get('num_bits')} bits per "
            f"{weights.get('strategy')} and {'dynamic' if inputs.get('dynamic') else 'static'} inputs per "
            f"{inputs.get('strategy')}; of {INT_FORMAT!r}, symmetric INT8 weights per tensor or channel with "
            "static inputs per tensor or dynamic ones per token can be read."
        )
    if group.get("output_activations"):
        raise Refused(f"Config group {name} quantizes outputs; quantized weights and inputs can be read.")
    return activations
