"""The formats that integer weights can be written in: what each can hold, its tensors and its settings.

A weight that a format cannot hold exactly is refused with the reason; nothing is rounded here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.awq_layout import AWQ_BITS, pack_awq
from bitsmith.quantize.compressed_tensors import pack_weight, quantization_config, weight_args
from bitsmith.quantize.gptq_layout import (
    GPTQ_CONFIG_NAME,
    ZERO_POINTS_LESS_ONE_BITS,
    ZeroPointLabel,
    pack_gptq,
)
from bitsmith.quantize.packing import values_per_unit
from bitsmith.quantize.weight import QuantizedWeight

FormatName = Literal["compressed-tensors", "gptq", "gptq_v2", "awq"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
_HEAD = "lm_head"  # a linear module by class, never quantized here


@dataclass(frozen=True, slots=True)
class GridSettings:
    """What all quantized modules of a checkpoint share. group_size None: one group for each output channel.

    left: linear modules inside the decoder layers that stay dense.
    """

    num_bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool = False
    left: Sequence[str] = ()


def grid_settings(scheme: QuantizationScheme) -> GridSettings:
    """scheme: resolved."""
    group_size = scheme.group_size if isinstance(scheme.group_size, int) else None
    return GridSettings(scheme.num_bits, group_size, scheme.symmetric, scheme.act_order is True)


class PackedFormat(Protocol):
    """scale_dtype: the only type that scales may have; None for any."""

    @property
    def scale_dtype(self) -> torch.dtype | None: ...

    def misfit(self, grid: GridSettings, shape: tuple[int, int]) -> str:
        """Why a module of shape (out, in) cannot be held, as the end of a sentence; "" where it can."""
        ...

    def store(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        """State-dict entries of one module."""
        ...

    def settings(self, grid: GridSettings) -> dict[str, Any]:
        """`quantization_config` for config.json."""
        ...

    @property
    def settings_file(self) -> str | None:
        """A file beside config.json that repeats the settings, for readers that look there."""
        ...


@dataclass(frozen=True, slots=True)
class CompressedTensorsOutput:
    """compressed-tensors `pack-quantized`."""

    scale_dtype: torch.dtype | None = None
    settings_file: str | None = None

    def misfit(self, grid: GridSettings, shape: tuple[int, int]) -> str:
        return ""

    def store(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        return pack_weight(module, weight)

    def settings(self, grid: GridSettings) -> dict[str, Any]:
        args = weight_args(grid.num_bits, grid.group_size, grid.symmetric, grid.act_order)
        return quantization_config(args, [_HEAD, *grid.left], "none")


@dataclass(frozen=True, slots=True)
class GptqOutput:
    """GPTQ. Groups are runs of neighbouring columns, so that desc_act is off whatever order they were
    rounded in."""

    label: ZeroPointLabel
    scale_dtype: torch.dtype | None = torch.float16
    settings_file: str | None = GPTQ_CONFIG_NAME

    def misfit(self, grid: GridSettings, shape: tuple[int, int]) -> str:
        if self.label == "gptq" and not grid.symmetric:
            return (
                "version 1 stores zero points less one, and readers take a zero point of 0 differently "
                "(GPTQModel refuses such files). Use gptq_v2, or a symmetric grid"
            )
        if self.label == "gptq" and grid.num_bits not in ZERO_POINTS_LESS_ONE_BITS:
            return (
                f"version 1 stores zero points less one, and at {grid.num_bits} bits its readers add the one "
                "back in different places. Use gptq_v2"
            )
        return _odd_size(shape, values_per_unit(grid.num_bits), ("outputs", "inputs"))

    def store(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        return _named(module, pack_gptq(weight, self.label))

    def settings(self, grid: GridSettings) -> dict[str, Any]:
        settings = {
            "quant_method": "gptq",
            "bits": grid.num_bits,
            "group_size": -1 if grid.group_size is None else grid.group_size,
            "desc_act": False,
            "static_groups": grid.act_order,
            "sym": grid.symmetric,
            "lm_head": False,
            "checkpoint_format": self.label,
            "meta": {"quantizer": [f"bitsmith:{version('bitsmith')}"]},
        }
        # GPTQModel's words for modules that are not packed.
        return settings | ({"dynamic": {f"-:^{name}$": {} for name in grid.left}} if grid.left else {})


@dataclass(frozen=True, slots=True)
class AwqOutput:
    """AWQ `gemm`. It always has zero points; a symmetric grid's lie in the middle of the range."""

    scale_dtype: torch.dtype | None = torch.float16
    settings_file: str | None = None

    def misfit(self, grid: GridSettings, shape: tuple[int, int]) -> str:
        if grid.num_bits != AWQ_BITS:
            return f"it holds {AWQ_BITS}-bit weights only. Use a {AWQ_BITS}-bit scheme, or another format"
        return _odd_size(shape, values_per_unit(AWQ_BITS), ("outputs",))

    def store(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        return _named(module, pack_awq(weight))

    def settings(self, grid: GridSettings) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": grid.num_bits,
            "group_size": -1 if grid.group_size is None else grid.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [_HEAD, *grid.left],
        }


def packed_format(name: FormatName) -> PackedFormat:
    if name == "awq":
        return AwqOutput()
    return CompressedTensorsOutput() if name == "compressed-tensors" else GptqOutput(name)


def check_scheme_fits(name: FormatName, scheme: QuantizationScheme) -> None:
    """Before a model is looked at. Raises Refused for what the format has no words for."""
    if name not in FORMATS:
        raise Refused(f"format {name!r} is not known. Valid formats: {', '.join(FORMATS)}.")
    if name == "compressed-tensors":
        return
    if not scheme.rounds_to_integers or scheme.activation_scale is not None:
        raise Refused(
            f"format {name} holds integer weights with unquantized inputs; scheme {scheme.name!r} is of "
            "another kind. Use compressed-tensors."
        )
    if scheme.kv_cache != "none":
        raise Refused(
            f"format {name} has no place for KV-cache scales, and kv_cache is {scheme.kv_cache!r}. "
            "Use compressed-tensors, or kv_cache none."
        )


def check_modules_fit(name: FormatName, grid: GridSettings, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises Refused naming the first module that the format cannot hold. shapes: module -> (out, in)."""
    for module, shape in shapes.items():
        reason = packed_format(name).misfit(grid, shape)
        if reason:
            raise Refused(f"format {name} cannot hold {module}: {reason}.")


def _odd_size(shape: tuple[int, int], unit: int, what: Sequence[str]) -> str:
    """what: which of outputs and inputs fill words."""
    sizes = dict(zip(("outputs", "inputs"), shape, strict=True))
    wrong = next((name for name in what if sizes[name] % unit), None)
    if wrong is None:
        return ""
    return (
        f"its {sizes[wrong]} {wrong} do not fill 32-bit words: no multiple of {unit}. "
        "Use compressed-tensors, which pads"
    )


def _named(module: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
