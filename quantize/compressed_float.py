"""The compressed-tensors `float-quantized` format: FP8 weights and how their inputs are rounded.

Names and layout are those that compressed-tensors 0.20 reads and writes. Not known here: files.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.fp8_weight import Fp8Weight

FLOAT_FORMAT = "float-quantized"
FLOAT_SUFFIXES = ("weight_scale", "input_scale")


def store_fp8(module_name: str, weight: Fp8Weight) -> dict[str, Tensor]:
    """State-dict entries of one module: `weight` F8_E4M3, `weight_scale` and `input_scale` F32."""
    entries = {f"{module_name}.weight": weight.values, f"{module_name}.weight_scale": weight.scale}
    if weight.input_scale is not None:
        entries[f"{module_name}.input_scale"] = torch.tensor([weight.input_scale])
    return entries


def load_fp8(module_name: str, read: Callable[[str], Tensor], activations: ActivationScale) -> Fp8Weight:
    """Inverse of `store_fp8`. activations: what the configuration declares. Raises Refused."""
    values, scale = read(f"{module_name}.weight"), read(f"{module_name}.weight_scale").float()
    if values.dtype != torch.float8_e4m3fn or values.dim() != 2:
        raise Refused(
            f"{module_name}.weight is {values.dtype} {list(values.shape)}; expected F8_E4M3 [out, in]."
        )
    if scale.numel() not in (1, values.shape[0]):
        raise Refused(
            f"{module_name}: weight_scale {list(scale.shape)} does not belong to weight "
            f"{list(values.shape)}; FP8 weights with a scale per tensor or per channel can be read."
        )
    scale = scale.reshape(1) if scale.numel() == 1 else scale.reshape(-1, 1)
    input_scale = None
    if activations == "tensor":
        stored = read(f"{module_name}.input_scale").float()
        if stored.numel() != 1 or not 0.0 < float(stored) < float("inf"):
            raise Refused(f"{module_name}: input_scale is {stored.tolist()}; it must be one positive number.")
        input_scale = float(stored)
    if not bool(torch.isfinite(scale).all()) or not bool(torch.isfinite(values.float()).all()):
        raise Refused(f"{module_name}: the FP8 weight or its scale is not finite; the checkpoint is damaged.")
    return Fp8Weight(values, scale, input_scale)


def fp8_weight_args(activations: ActivationScale) -> dict[str, Any]:
    """The `weights` entry of a config group: per tensor beside static inputs, else per channel."""
    return _args("tensor" if activations == "tensor" else "channel", dynamic=False)


def fp8_input_args(activations: ActivationScale) -> dict[str, Any]:
    """The `input_activations` entry of a config group."""
    return _args(activations, dynamic=activations == "token")


def _args(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": None,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }


def declared_fp8(config: Mapping[str, Any]) -> ActivationScale | None:
    """How a checkpoint's FP8 modules round their inputs; None where it declares no FP8 weights.

    Raises Refused for a kind that is not known, or for several kinds.
    """
    quantization = config.get("quantization_config") or {}
    groups = (quantization.get("config_groups") or {}).items()
    kinds = {
        _group_activations(name, group)
        for name, group in groups
        if (group.get("format") or quantization.get("format")) == FLOAT_FORMAT
    }
    if len(kinds) > 1:
        raise Refused(
            "The checkpoint has FP8 modules with static and with dynamic inputs; one kind can be read."
        )
    return next(iter(kinds), None)


def _group_activations(name: str, group: Mapping[str, Any]) -> ActivationScale:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    kinds: dict[tuple[Any, bool], ActivationScale] = {("tensor", False): "tensor", ("token", True): "token"}
    activations = kinds.get((inputs.get("strategy"), bool(inputs.get("dynamic"))))
    is_fp8 = all((args.get("type"), args.get("num_bits")) == ("float", 8) for args in (weights, inputs))
    if not is_fp8 or weights.get("strategy") not in ("tensor", "channel") or activations is None:
        raise Refused(
            f"Config group {name} has {weights.get('type')} weights of {weights.get('num_bits')} bits per "
            f"{weights.get('strategy')} and {'dynamic' if inputs.get('dynamic') else 'static'} inputs per "
            f"{inputs.get('strategy')}; of {FLOAT_FORMAT!r}, FP8 weights per tensor or channel with static "
            "inputs per tensor or dynamic ones per token can be read."
        )
    if group.get("output_activations"):
        raise Refused(f"Config group {name} quantizes outputs; quantized weights and inputs can be read.")
    return activations
