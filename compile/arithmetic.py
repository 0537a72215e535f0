"""Which number formats an engine computes with: resolves "auto" once, refuses what cannot be done."""

from dataclasses import dataclass
from typing import Literal

from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.compile.decoder_plan import Activations, DecoderPlan, KVCacheType, LinearSpec
from bitsmith.compile.packing import engine_weight
from bitsmith.core.errors import Refused
from bitsmith.core.scheme import ActivationScale
from bitsmith.ops.isa import cpu_flags, fastest_form
from bitsmith.quantize.int8_weight import Int8Weight
from bitsmith.quantize.kv_scales import KV_GRID_END, ScaledKVCache, converted_scale
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import WeightSource

KVScale = Literal["calibrated", "ones"]


@dataclass(frozen=True, slots=True)
class KVCacheChoice:
    """kv_scales: for each layer (key scale, value scale). are_calibrated: measured, not set to one."""

    kv_cache: KVCacheType
    kv_scales: tuple[tuple[float, float], ...]
    are_calibrated: bool


def resolve_activations(
    requested: Literal["auto"] | Activations,
    *,
    is_quantized: bool,
    is_fp8: bool = False,
    int8_inputs: ActivationScale | None = None,
) -> Activations:
    """auto: fp8 for FP8 weights; int8 where the checkpoint declares INT8 inputs, and for integer weights
    where its product is vectorised; else bf16.

    is_quantized: to integers. is_fp8: FP8 weights and a declared way of rounding their inputs. int8_inputs:
    how far a scale of declared INT8 inputs reaches.
    """
    if int8_inputs == "tensor" and requested in ("auto", "int8"):
        raise Refused(
            f"--activations {requested}: the checkpoint's INT8 inputs have one static scale per tensor, and "
            "the native engine's have one for each token. Quantize with --activation-scale token, or take "
            "--activations bf16 or fp32, which leave inputs unrounded."
        )
    if int8_inputs == "token" and requested == "auto":
        return "int8"
    if requested == "fp8" and not is_fp8:
        raise Refused(
            "--activations fp8 needs FP8 weights (schemes w8a8-fp8*), and this checkpoint has none."
        )
    if is_fp8:
        if requested == "int8":
            raise Refused(
                "--activations int8 needs integer weights; this checkpoint's are FP8. "
                "Take auto (as the checkpoint says), bf16 or fp32."
            )
        return "fp8" if requested == "auto" else requested
    if requested == "int8" and not is_quantized:
        raise Refused(
            "--activations int8 needs quantized weights, and this checkpoint has none. "
            "Quantize it first, or take bf16 or fp32."
        )
    if requested != "auto":
        return requested
    # The int8 product is vectorised in every form but one; VNNI is not a condition (docs/adr/0005).
    return "int8" if is_quantized and fastest_form(cpu_flags()) != "portable" else "bf16"


def resolve_kv_cache(
    source: WeightSource,
    config: DecoderConfig,
    requested: Literal["auto"] | KVCacheType,
    kv_scale: KVScale,
) -> KVCacheChoice:
    """auto: what the checkpoint declares, else bf16. fp8 and int8 need scales, or `ones` asked for."""
    declared: KVCacheType = "bf16" if source.kv_cache_type == "none" else source.kv_cache_type
    kv_cache = declared if requested == "auto" else requested
    ones = ((1.0, 1.0),) * config.num_layers
    if kv_cache in KV_GRID_END and kv_scale == "calibrated":
        return KVCacheChoice(kv_cache, calibrated_scales(source, config, kv_cache), are_calibrated=True)
    if kv_cache not in KV_GRID_END and kv_scale == "ones":
        raise Refused(f"--kv-scale ones applies to an fp8 or int8 KV cache; this one is {kv_cache}.")
    return KVCacheChoice(kv_cache, ones, are_calibrated=False)


def calibrated_scales(
    source: WeightSource, config: DecoderConfig, kv_cache: ScaledKVCache
) -> tuple[tuple[float, float], ...]:
    """For each layer (key scale, value scale). Raises Refused where the checkpoint has no calibrated ones.

    Scales that were calibrated for the other type tell the same largest magnitudes, and are converted.
    """
    remedy = (
        f"Quantize with --kv-cache {kv_cache}, take --kv-cache bf16, or set scales of one with "
        "--kv-scale ones."
    )
    of = source.kv_cache_type
    if of == "none":
        raise Refused(f"An {kv_cache} KV cache needs scales, and the checkpoint declares none. {remedy}")
    scales = []
    for layer_index in range(config.num_layers):
        pair = source.kv_scales(layer_index)
        if pair is None:
            raise Refused(
                f"An {kv_cache} KV cache needs calibrated scales; layer {layer_index} has none. {remedy}"
            )
        if not all(0.0 < scale < float("inf") for scale in pair):
            raise Refused(f"Layer {layer_index} has KV scales {pair}; they must be positive and finite.")
        scales.append(pair)
    if all(pair == (1.0, 1.0) for pair in scales):
        raise Refused(f"All KV scales of the checkpoint are 1.0, so they are not calibrated. {remedy}")
    return tuple(
        (converted_scale(key, of, kv_cache), converted_scale(value, of, kv_cache)) for key, value in scales
    )


def _activations_text(spec: LinearSpec) -> str:
    if spec.activations == "int8" and spec.group_size == spec.in_features:
        return "int8 (a scale for each token)"
    if spec.activations != "fp8":
        return spec.activations
    return "fp8 (a scale for each token)" if spec.input_scale is None else "fp8 (static scales)"


def _reach_text(spec: LinearSpec) -> str:
    is_whole_row = spec.group_size == spec.in_features
    reach = "a scale for each output channel" if is_whole_row else f"group {spec.group_size}"
    if spec.checkpoint_bits is None:
        return reach
    return f"{reach}, {spec.checkpoint_bits} bits packed as {spec.num_bits}"


def is_quantized(source: WeightSource, config: DecoderConfig) -> bool:
    """Whether any linear weight of the decoder is quantized to integers."""
    parts = ("self_attn.o_proj", "mlp.down_proj")
    modules = (f"model.layers.{index}.{part}" for index in range(config.num_layers) for part in parts)
    kinds = QuantizedWeight | Int8Weight
    return any(isinstance(engine_weight(source, module), kinds) for module in modules)


def describe_arithmetic(plan: DecoderPlan, *, kv_is_calibrated: bool) -> str:
    """One line for terminals and reports."""
    specs = {spec for name, parts in plan.linears.items() for spec in parts if name != "head"}
    integers = {spec for spec in specs if spec.is_quantized and not spec.is_fp8}
    quantized = [spec for spec in specs if spec.is_quantized]
    dense = sorted({spec.num_bits for spec in specs if not spec.is_quantized})
    activations = sorted({_activations_text(spec) for spec in quantized or specs})
    weights = sorted({f"int{spec.num_bits} weights ({_reach_text(spec)})" for spec in integers})
    if any(spec.is_fp8 for spec in specs):
        weights.append("fp8 weights")
    if not quantized:
        weights = ["bf16 weights" if 16 in dense else "fp32 weights"]
    scales = ""
    if plan.kv_cache in KV_GRID_END:
        scales = ", calibrated scales" if kv_is_calibrated else ", UNCALIBRATED scales of one"
    head = _describe_head(plan.linears["head"][0])
    inputs = f"{'/'.join(activations)} activations"
    return f"{', '.join(weights)}, {head} head, {inputs}, {plan.kv_cache} KV cache{scales}"


def _describe_head(spec: LinearSpec) -> str:
    if spec.is_quantized:
        return f"int{spec.num_bits}"
    return "bf16" if spec.num_bits == 16 else "fp32"
