"""The compressed-tensors `float-quantized` format: FP8 weights and how their inputs are rounded.

Names and layout are those that compressed-tensors 0.20 reads and writes. Not known here: files.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.compressed_inputs import InputFormat, load_input_scale
from bitsmith.quantize.fp8_weight import Fp8Weight

FLOAT_QUANTIZED = InputFormat("float-quantized", "float", "FP8")
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
    input_scale = load_input_scale(module_name, read, activations)
    if not bool(torch.isfinite(scale).all()) or not bool(torch.isfinite(values.float()).all()):
        raise Refused(f"{module_name}: the FP8 weight or its scale is not finite; the checkpoint is damaged.")
    return Fp8Weight(values, scale, input_scale)


def fp8_weight_args(activations: ActivationScale) -> dict[str, Any]:
    """The `weights` entry of a config group: per tensor beside static inputs, else per channel."""
    return FLOAT_QUANTIZED.args("tensor" if activations == "tensor" else "channel", dynamic=False)
