"""Planning an export to a TensorRT-LLM checkpoint: everything that can be refused is refused here.

The configuration that will be written is read back and checked by the validator's own rules, so an export
that this module lets through is one that the validator accepts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from bitsmith.compile.decoder_config import DecoderConfig, read_decoder_config
from bitsmith.compile.tensorrt_check_quant import check_quantization, loses_paged_attention
from bitsmith.compile.tensorrt_config import read_model
from bitsmith.compile.tensorrt_engine_config import engine_config, engine_model
from bitsmith.compile.tensorrt_finding import Severity
from bitsmith.compile.tensorrt_fuse import share_scales
from bitsmith.compile.tensorrt_kv_plan import KvCacheChoice, KvPlan, KvScaleChoice, plan_kv_cache
from bitsmith.compile.tensorrt_layout import module_name
from bitsmith.compile.tensorrt_linear import WeightOnlyLinear
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_names import LINEARS, hf_linear_names
from bitsmith.compile.tensorrt_quantization import WEIGHT_ONLY, QuantConfig
from bitsmith.compile.tensorrt_release import DEFAULT_RELEASE, Release
from bitsmith.compile.tensorrt_source import ExportSource
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Fallback

# Linears that share scales: one layer, or one fused kernel.
FUSED_GROUPS = (("attention.qkv",), ("mlp.fc", "mlp.gate"))


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What the user asks of an export. is_strict: what is not exactly as asked is refused.

    wants_kv_reuse, wants_chunked_prefill: asked for by name, so losing them is refused.
    """

    release: Release = DEFAULT_RELEASE
    tp_size: int = 1
    pp_size: int = 1
    kv_cache: KvCacheChoice = "auto"
    kv_scale: KvScaleChoice = "calibrated"
    kv_scale_floor: float = 0.0
    is_strict: bool = False
    wants_kv_reuse: bool = False
    wants_chunked_prefill: bool = False


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A resolved export: nothing in it is `auto`."""

    model: EngineModel
    decoder: DecoderConfig
    release: Release
    kv: KvPlan
    has_paged_attention: bool
    fallbacks: tuple[Fallback, ...] = field(default=())


def plan_export(source: ExportSource, settings: ExportSettings) -> ExportPlan:
    """Raises Refused naming the field, the value and the remedy; writes nothing."""
    if settings.tp_size < 1 or settings.pp_size < 1:
        raise Refused("Parallel sizes must be 1 or more.")
    decoder = read_decoder_config(source.config)
    if decoder.norm_plus_one and settings.pp_size > 1:
        raise Refused(
            "Gemma shares its embedding table with the head, which TensorRT-LLM cannot do across pipeline "
            "ranks. Use --pipeline-parallel 1 and, if need be, tensor parallelism."
        )
    kv = plan_kv_cache(
        source, settings.kv_cache, settings.kv_scale, settings.kv_scale_floor, decoder.num_layers
    )
    fallbacks = []
    dtype = str(source.tensor("model.embed_tokens.weight").dtype).removeprefix("torch.")
    if dtype == "float32":
        reason = "TensorRT-LLM's kernels for these modes work in 16 bits"
        fallbacks.append(Fallback("dtype", "float32", "bfloat16", reason))
        dtype = "bfloat16"
    quant = _quant_config(source, decoder, kv, settings)
    model = engine_model(decoder, quant, dtype, settings.tp_size, settings.pp_size)
    _check(decoder, model, settings.release)
    loses_paged = loses_paged_attention(quant, settings.release)
    if loses_paged:
        fallbacks.append(_lost_paged_attention(quant, settings))
    if source.is_quantized("lm_head"):
        reason = "the head of an engine is in the model's dtype"
        fallbacks.append(Fallback("lm_head", "quantized", dtype, reason))
    if settings.is_strict:
        _refuse_inexact(source, model, fallbacks)
    return ExportPlan(model, decoder, settings.release, kv, not loses_paged, tuple(fallbacks))


def _quant_config(
    source: ExportSource, decoder: DecoderConfig, kv: KvPlan, settings: ExportSettings
) -> QuantConfig:
    scheme = source.scheme
    if scheme.quant_algo is None:
        return QuantConfig(kv_cache_quant_algo=kv.algo)
    dense = list(_dense_modules(source, decoder))
    if dense and settings.pp_size > 1:
        raise Refused(
            f"{dense[0]} is dense while others are quantized, and layer numbers restart on every pipeline "
            "rank, so it cannot be named there. Use --pipeline-parallel 1, or quantize all layers alike."
        )
    is_weight_only = scheme.quant_algo in WEIGHT_ONLY
    head = ("*lm_head", "*vocab_embedding") if is_weight_only else ("lm_head",)
    return QuantConfig(
        quant_algo=scheme.quant_algo,
        kv_cache_quant_algo=kv.algo,
        group_size=scheme.group_size or 128,
        has_zero_point=not scheme.is_symmetric,
        pre_quant_scale=scheme.has_pre_quant_scale,
        exclude_modules=(*head, *dense),
    )


def _dense_modules(source: ExportSource, decoder: DecoderConfig) -> Iterator[str]:
    """TensorRT-LLM names of linears that stay dense. Raises Refused where a fused layer is mixed."""
    for layer in range(decoder.num_layers):
        for name in LINEARS:
            parts = hf_linear_names(layer, name)
            quantized = [part for part in parts if source.is_quantized(part)]
            if quantized and len(quantized) != len(parts):
                raise Refused(
                    f"{', '.join(parts)} are one layer in TensorRT-LLM, but only {', '.join(quantized)} "
                    "is quantized. Quantize all of them, or none."
                )
            if not quantized:
                yield module_name(layer, name)


def _check(decoder: DecoderConfig, model: EngineModel, release: Release) -> None:
    body = engine_config(decoder, model, release)
    read, findings = read_model(body, release)
    if read is not None:
        assert read == model, (read, model)
        findings = [*findings, *check_quantization(model, body, release)]
    refusals = [finding for finding in findings if finding.severity is Severity.REFUSE]
    if refusals:
        texts = "; ".join(f"{finding.where}: {finding.text}" for finding in refusals[:3])
        raise Refused(f"This cannot be exported for TensorRT-LLM {release}. {texts}")


def _lost_paged_attention(quant: QuantConfig, settings: ExportSettings) -> Fallback:
    weights = quant.quant_algo or "unquantized"
    asked = [
        text
        for text, is_asked in (
            ("KV reuse", settings.wants_kv_reuse),
            ("chunked prefill", settings.wants_chunked_prefill),
        )
        if is_asked
    ]
    if asked:
        raise Refused(
            f"{' and '.join(asked)} cannot be had with {quant.kv_cache_quant_algo} KV cache and {weights} "
            f"weights in TensorRT-LLM {settings.release}: paged context attention must be off. Use FP8 "
            "weights, or --kv-cache bf16."
        )
    return Fallback(
        "use_paged_context_fmha",
        "enable (KV reuse and chunked prefill)",
        "disable",
        f"{quant.kv_cache_quant_algo} KV cache with {weights} weights needs it off in {settings.release}",
    )


def _refuse_inexact(source: ExportSource, model: EngineModel, fallbacks: list[Fallback]) -> None:
    if fallbacks:
        first = fallbacks[0]
        raise Refused(f"--strict: {first.where} would be {first.done}, not {first.asked}: {first.reason}.")
    if model.quant.quant_algo in WEIGHT_ONLY:
        raise Refused(
            f"--strict: TensorRT-LLM quantizes {model.quant.quant_algo} weights again when it builds, so the "
            "checkpoint's own integers are not kept. Use a 4-bit or FP8 scheme."
        )
    for layer in range(model.num_layers):
        for group in FUSED_GROUPS:
            parts = [part for name in group for part in hf_linear_names(layer, name)]
            for part, error in zip(parts, fused_errors(source, parts, group), strict=True):
                if error > 0:
                    raise Refused(
                        f"--strict: {part} would be rounded again to a scale that it shares (relative error "
                        f"{error:.2g}). Quantize with --for tensorrt-llm, which shares scales from the start."
                    )


def fused_errors(source: ExportSource, parts: list[str], group: tuple[str, ...]) -> list[float]:
    """Relative error that sharing scales costs each part."""
    linears = [source.linear(part) for part in parts]
    exact = [linear for linear in linears if not isinstance(linear, WeightOnlyLinear)]
    assert len(exact) == len(linears), parts  # weight-only schemes are refused before
    return share_scales(exact, ", ".join(parts), is_one_layer=len(group) == 1)[1]
