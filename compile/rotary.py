"""Rotary position embedding: which variant a configuration asks for, and its frequencies.

Reads the `rope_parameters` that transformers standardises old names to. Variants: default, linear,
llama3, YaRN; others are refused by name. Not known here: where the rotation is applied.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.errors import Refused

_PARAMETER_NAMES: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}
_COMMON_NAMES = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """One variant, with every parameter resolved.

    theta: base of the wavelengths. factor: how far positions are stretched (1: not at all).
    original_max_positions: context of the pretraining (llama3, yarn). attention_factor: multiplies cos and
    sin (yarn). The other fields belong to the variant of their name.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def parse_rotary(parameters: Mapping[str, Any], max_positions: int) -> RotaryConfig:
    """RotaryConfig of one standardised `rope_parameters` mapping; Refused names what is not supported."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _PARAMETER_NAMES:
        supported = ", ".join(_PARAMETER_NAMES)
        raise Refused(f"config.json: rope_type {rope_type!r} is not supported (supported: {supported}).")
    given = {name: value for name, value in parameters.items() if value is not None}
    unknown = sorted(given.keys() - _PARAMETER_NAMES[rope_type] - _COMMON_NAMES)
    if unknown:
        raise Refused(f"config.json: rope parameter {unknown[0]!r} is not known for rope_type {rope_type!r}.")
    if (rotated_frac := given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise Refused(f"config.json: partial_rotary_factor {rotated_frac} is not supported.")
    theta = float(given["rope_theta"])
    if rope_type == "default":
        return RotaryConfig("default", theta)
    original = int(given.get("original_max_position_embeddings", max_positions))
    factor = float(given["factor"]) if "factor" in given else max_positions / original
    if rope_type == "linear":
        return RotaryConfig("linear", theta, factor)
    if rope_type == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        return RotaryConfig("llama3", theta, factor, original, low, high)
    return RotaryConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    def scale_of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if "attention_factor" in given:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale_of(given["mscale"]) / scale_of(given["mscale_all_dim"])
    return scale_of(1.0)


def inverse_frequencies(rotary: RotaryConfig, head_size: int) -> Tensor:
    """Angle per position of each rotated pair: [head_size / 2] fp32."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rotary.theta**exponents)
    if rotary.rope_type == "linear":
        return frequencies / rotary.factor
    if rotary.rope_type == "llama3":
        return _llama3_frequencies(rotary, frequencies)
    if rotary.rope_type == "yarn":
        return _yarn_frequencies(rotary, frequencies, head_size)
    return frequencies


def _llama3_frequencies(rotary: RotaryConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    longest_kept = rotary.original_max_positions / rotary.high_freq_factor
    shortest_stretched = rotary.original_max_positions / rotary.low_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / rotary.factor, frequencies)
    smooth = (rotary.original_max_positions / wavelengths - rotary.low_freq_factor) / (
        rotary.high_freq_factor - rotary.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rotary.factor + smooth * stretched
    is_between = ~(wavelengths < longest_kept) & ~(wavelengths > shortest_stretched)
    return torch.where(is_between, blended, stretched)


def _yarn_frequencies(rotary: RotaryConfig, frequencies: Tensor, head_size: int) -> Tensor:
    """Section 3.2 of the YaRN paper (arXiv:2309.00071): a ramp between stretched and kept frequencies."""

    def pair_of(num_rotations: float) -> float:
        positions = rotary.original_max_positions / (num_rotations * 2 * math.pi)
        return head_size * math.log(positions) / (2 * math.log(rotary.theta))

    low, high = pair_of(rotary.beta_fast), pair_of(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return frequencies / rotary.factor * ramp + frequencies * (1 - ramp)
