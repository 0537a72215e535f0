"""Scales of a layer's KV cache, from the keys and values that the layer puts into it.

An observer stands where the layer expects its cache, so it sees exactly what is stored: keys after
rotary embedding. stored = real / scale; the largest magnitude seen maps to the end of the type's grid.
"""

from typing import Any, Literal

from torch import Tensor

from bitsmith.quantize.fp8_weight import FP8_MAX

ScaledKVCache = Literal["fp8", "int8"]
KV_GRID_END: dict[ScaledKVCache, float] = {"fp8": FP8_MAX, "int8": 127.0}


def converted_scale(scale: float, of: ScaledKVCache, to: ScaledKVCache) -> float:
    """The scale for another type from the same largest magnitude: calibrated once, known for both."""
    return scale if of == to else scale * KV_GRID_END[of] / KV_GRID_END[to]


class KVObserver:
    """The part of a transformers cache that attention calls; it stores nothing."""

    def __init__(self) -> None:
        self._key_amax = 0.0
        self._value_amax = 0.0

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """key, value: [batch, num_kv_heads, seq, head_size]; returned as they are."""
        self._key_amax = max(self._key_amax, float(key.abs().max()))
        self._value_amax = max(self._value_amax, float(value.abs().max()))
        return key, value

    def scales(self, kv_cache: ScaledKVCache) -> tuple[float, float] | None:
        """(key scale, value scale); None when nothing, or nothing but zeros, was seen."""
        if self._key_amax == 0.0 or self._value_amax == 0.0:
            return None
        return self._key_amax / KV_GRID_END[kv_cache], self._value_amax / KV_GRID_END[kv_cache]
