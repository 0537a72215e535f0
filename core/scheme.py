"""Quantization schemes: what each name means, and the settings that refine it."""

import re
from dataclasses import dataclass
from typing import Literal

from bitsmith.core.errors import Refused

Method = Literal["rtn", "gptq"]
KVCacheScheme = Literal["none", "fp8"]

_WEIGHT_ONLY = re.compile(r"^w(?P<bits>[48])a16-(?P<method>rtn|gptq)$")
SCHEME_NAMES = ("w4a16-gptq", "w4a16-rtn", "w8a16-gptq", "w8a16-rtn", "none")


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """A scheme as the user asked for it; `quantize` resolves "auto" into a new one.

    num_bits: weight bits, 16 for the scheme `none`. group_size: columns per scale, "auto", or "channel"
    for one scale per output channel. kv_cache: the KV-cache type for which scales are calibrated.
    """

    name: str
    num_bits: int
    method: Method | None
    group_size: int | Literal["auto", "channel"] = "auto"
    symmetric: bool = True
    act_order: bool = False
    kv_cache: KVCacheScheme = "none"


def parse_scheme_name(name: str) -> tuple[int, Method | None]:
    """(weight bits, method) of a scheme's name. Raises Refused listing the valid names."""
    if name == "none":
        return 16, None
    match = _WEIGHT_ONLY.match(name)
    if match is None:
        raise Refused(f"Unknown scheme {name!r}. Valid schemes: {', '.join(SCHEME_NAMES)}.")
    method: Method = "gptq" if match["method"] == "gptq" else "rtn"
    return int(match["bits"]), method
