"""The compressed-tensors `int-quantized` format: INT8 weights and how their inputs are rounded.

Names and layout are those that compressed-tensors 0.20 reads and writes. Not known here: files.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale
from bitsmith.quantize.compressed_inputs import InputFormat, load_input_scale
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.weight import QuantizedWeight

INT_QUANTIZED = InputFormat("int-quantized", "int", "INT8", needs_symmetric=True)


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
    input_scale = load_input_scale(module_name, read, activations)
    rows = scale.reshape(-1, 1).expand(values.shape[0], 1).contiguous()
    return Int8Weight(QuantizedWeight(values, rows, None, 8, values.shape[1]), input_scale)


def int8_weight_args() -> dict[str, Any]:
    """The `weights` entry of a config group."""
    return INT_QUANTIZED.args("channel", dynamic=False)
