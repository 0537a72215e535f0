"""Everything that decides the decoder's graph: configuration, arithmetic, linear shapes, KV scales.

It is stored in the engine as `decoder.json`, so that the same module can be built again without compiling.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.core.errors import Refused

KVScales = tuple[tuple[float, float], ...]
KVCacheType = Literal["fp8", "int8", "bf16", "fp32"]
Activations = Literal["fp8", "int8", "bf16", "fp32"]
HeadType = Literal["checkpoint", "int8"]

ACTIVATION_CODES: dict[Activations, int] = {"fp32": 0, "bf16": 1, "int8": 2, "fp8": 3}
KV_CACHE_DTYPES: dict[KVCacheType, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
PLAN_NAME = "decoder.json"
_PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One product x @ weight.T. num_bits 16 or 32: dense weights of that width, group_size 0.

    is_fp8: e4m3 weights with a scale for each row. input_scale: the static one of fp8 activations; None:
    each token has its own. checkpoint_bits: of integers that have fewer bits in the checkpoint than here.
    """

    in_features: int
    out_features: int
    num_bits: int
    group_size: int
    activations: Activations
    has_bias: bool
    has_zero_point: bool
    is_fp8: bool = False
    input_scale: float | None = None
    checkpoint_bits: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.num_bits < 16


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """linears: name in the decoder -> the products whose outputs are joined (one where rows were fused).

    kv_scales: for each layer (key scale, value scale); stored = real / scale.
    """

    config: DecoderConfig
    kv_cache: KVCacheType
    linears: Mapping[str, tuple[LinearSpec, ...]]
    kv_scales: KVScales

    @property
    def shares_embedding(self) -> bool:
        """Whether the head reads the embedding table: tied, and not quantized by itself."""
        return self.config.is_tied and not self.linears["head"][0].is_quantized

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        return KV_CACHE_DTYPES[self.kv_cache]

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_size * self.kv_cache_dtype.itemsize

    def with_kv_cache(self, kv_cache: KVCacheType, kv_scales: KVScales | None = None) -> "DecoderPlan":
        """The same decoder over a cache of another type. kv_scales None: scales of one."""
        ones = tuple((1.0, 1.0) for _ in self.kv_scales)
        return dataclasses.replace(self, kv_cache=kv_cache, kv_scales=kv_scales or ones)

    def to_json(self) -> str:
        linears = {name: [dataclasses.asdict(spec) for spec in specs] for name, specs in self.linears.items()}
        plain = {
            "version": _PLAN_VERSION,
            "config": self.config.to_json(),
            "kv_cache": self.kv_cache,
            "linears": linears,
            "kv_scales": self.kv_scales,
        }
        return json.dumps(plain, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "DecoderPlan":
        plain: dict[str, Any] = json.loads(text)
        if plain["version"] != _PLAN_VERSION:
            raise Refused(f"{PLAN_NAME} has version {plain['version']}; this release reads {_PLAN_VERSION}.")
        linears = {
            name: tuple(LinearSpec(**spec) for spec in specs) for name, specs in plain["linears"].items()
        }
        scales = tuple((float(key), float(value)) for key, value in plain["kv_scales"])
        return cls(DecoderConfig.from_json(plain["config"]), plain["kv_cache"], linears, scales)
