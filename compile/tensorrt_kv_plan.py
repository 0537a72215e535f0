"""The KV cache of an export: which type, and one dequantization scale for each layer."""

from dataclasses import dataclass
from typing import Literal

from bitsmith.compile.tensorrt_source import ExportSource
from bitsmith.core.errors import Refused
from bitsmith.quantize.kv_scales import ScaledKVCache, converted_scale

KvCacheChoice = Literal["auto", "fp8", "int8", "bf16", "fp32"]
KvScaleChoice = Literal["calibrated", "ones"]
_KV_TYPES: dict[str, ScaledKVCache] = {"FP8": "fp8", "INT8": "int8"}


@dataclass(frozen=True, slots=True)
class KvPlan:
    """algo: FP8, INT8 or None for the model's dtype. scales: one for each layer, empty without an algo.

    provenance: where the scales come from, for the manifest.
    """

    algo: str | None
    scales: tuple[float, ...]
    provenance: str


def plan_kv_cache(
    source: ExportSource, choice: KvCacheChoice, scale_choice: KvScaleChoice, floor: float, num_layers: int
) -> KvPlan:
    """Resolve the choice. Raises Refused when scales are missing and were not said to be ones.

    The scale is amax / 448 (FP8) or amax / 127 (INT8), the larger of key and value, at least `floor`;
    a floor of 1.0 is what ModelOpt's exporter does.
    """
    algo = _resolve_algo(source, choice)
    if algo is None:
        return KvPlan(None, (), "none")
    if scale_choice == "ones":
        return KvPlan(algo, (1.0,) * num_layers, "ones, as asked")
    stored_algo = source.scheme.kv_algo
    pairs = [source.kv_scales(layer) for layer in range(num_layers)]
    known = [pair for pair in pairs if pair is not None]
    if stored_algo is None or len(known) != num_layers:
        missing = next((layer for layer, pair in enumerate(pairs) if pair is None), 0)
        raise Refused(
            f"{source.path} has no calibrated KV scales (layer {missing}), which --kv-cache {algo.lower()} "
            f"needs. Quantize with --kv-cache {algo.lower()}, or say --kv-scale ones."
        )
    of, to = _KV_TYPES[stored_algo], _KV_TYPES[algo]
    scales = tuple(max(floor, converted_scale(max(pair), of, to)) for pair in known)
    bad = next((layer for layer, scale in enumerate(scales) if not 0 < scale < float("inf")), None)
    if bad is not None:
        raise Refused(f"{source.path}: layer {bad} has a KV scale of {scales[bad]:g}; calibrate it again.")
    provenance = "calibrated" if floor == 0 else f"calibrated, at least {floor:g}"
    return KvPlan(algo, scales, provenance)


def _resolve_algo(source: ExportSource, choice: KvCacheChoice) -> str | None:
    if choice == "auto":
        return source.scheme.kv_algo
    if choice == "bf16":
        return None
    if choice == "fp32":
        raise Refused("--kv-cache fp32 is for the native engine; TensorRT-LLM takes auto, fp8, int8 or bf16.")
    return choice.upper()
