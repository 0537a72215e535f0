"""Quantization schemes: what each name means, and the settings that refine it."""

import re
from dataclasses import dataclass
from typing import Literal

from bitsmith.core.errors import Refused

Method = Literal["rtn", "gptq", "awq", "awq-gptq", "smoothquant", "fp8"]
KVCacheScheme = Literal["none", "fp8", "int8"]
ActivationScale = Literal["tensor", "token"]

_WEIGHT_ONLY = re.compile(r"^w(?P<bits>[2348])a16-(?P<method>rtn|gptq|awq|awq-gptq)$")
INTEGER_BITS = (2, 3, 4, 8)  # widths of weights that are rounded to integers
_INTEGER_METHODS: tuple[Method, ...] = ("gptq", "awq", "awq-gptq", "rtn")
# Schemes that quantize activations too: how far one of their scales reaches.
_FP8_INPUTS: dict[str, ActivationScale] = {"w8a8-fp8": "tensor", "w8a8-fp8-dynamic": "token"}
INT8_SCHEME = "w8a8-int8"
SCHEME_NAMES = (
    *(f"w{num_bits}a16-{method}" for num_bits in INTEGER_BITS for method in _INTEGER_METHODS),
    INT8_SCHEME,
    *_FP8_INPUTS,
    "none",
)
DEFAULT_REFINE_STEPS = 50


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """A scheme as the user asked for it; `quantize` resolves "auto" into a new one.

    num_bits: weight bits, 16 for the scheme `none`. group_size: columns per scale, "auto", "channel" for
    one scale per output channel, or "tensor" (only resolved, for FP8). act_order: None lets the method
    choose. kv_cache: the KV-cache type for which scales are calibrated. signed_scale: symmetric scales may
    be negative; a target may forbid it. refine_steps: of learned rounding for each layer after the method,
    0 for none. int8_inputs: how far a scale of w8a8-int8's inputs reaches, None in every other scheme.
    """

    name: str
    num_bits: int
    method: Method | None
    group_size: int | Literal["auto", "channel", "tensor"] = "auto"
    symmetric: bool = True
    act_order: bool | None = None
    kv_cache: KVCacheScheme = "none"
    signed_scale: bool = True
    refine_steps: int = 0
    int8_inputs: ActivationScale | None = None

    @property
    def activation_scale(self) -> ActivationScale | None:
        """tensor: one static scale, from calibration. token: chosen at run time. None: not quantized."""
        return self.int8_inputs if self.name == INT8_SCHEME else _FP8_INPUTS.get(self.name)

    @property
    def rounds_to_integers(self) -> bool:
        return self.method in _INTEGER_METHODS

    @property
    def moves_scales(self) -> bool:
        """Whether scales move between weights and inputs, folded into the operator before."""
        return self.method in ("awq", "awq-gptq", "smoothquant")

    @property
    def uses_gptq(self) -> bool:
        return self.method in ("gptq", "awq-gptq")


def resolve_refine_steps(refine: bool, steps: int | None) -> int:
    """Steps of refinement, 0 for none. Raises Refused where steps are given and refinement is not."""
    if steps is not None and not refine:
        raise Refused(
            f"refine_steps is {steps}, but refine is off. Turn refine on, or leave refine_steps out."
        )
    if steps is not None and steps < 1:
        raise Refused(f"refine_steps is {steps}; it must be at least 1.")
    return (steps or DEFAULT_REFINE_STEPS) if refine else 0


def resolve_int8_inputs(scheme_name: str, asked: ActivationScale | None) -> ActivationScale | None:
    """Of w8a8-int8 what was asked for, else `token`. Raises Refused for another scheme that is given one."""
    if scheme_name == INT8_SCHEME:
        return asked or "token"
    if asked is not None:
        raise Refused(
            f"activation_scale is {asked!r}; only scheme {INT8_SCHEME!r} leaves a choice, not "
            f"{scheme_name!r}. Leave activation_scale out."
        )
    return None


def parse_scheme_name(name: str) -> tuple[int, Method | None]:
    """(weight bits, method) of a scheme's name. Raises Refused listing the valid names."""
    if name == "none":
        return 16, None
    if name in _FP8_INPUTS:
        return 8, "fp8"
    if name == INT8_SCHEME:
        return 8, "smoothquant"
    match = _WEIGHT_ONLY.match(name)
    if match is None:
        raise Refused(f"Unknown scheme {name!r}. Valid schemes: {', '.join(SCHEME_NAMES)}.")
    (method,) = (known for known in _INTEGER_METHODS if known == match["method"])
    return int(match["bits"]), method
