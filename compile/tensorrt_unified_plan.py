"""Planning a checkpoint for TensorRT-LLM's PyTorch backend: its quantization, and what must be refused."""

from collections.abc import Iterator
from dataclasses import dataclass

from bitsmith.compile.decoder_config import DecoderConfig, read_decoder_config
from bitsmith.compile.tensorrt_kv_plan import KvCacheChoice, KvScaleChoice
from bitsmith.compile.tensorrt_linear import WeightOnlyLinear
from bitsmith.compile.tensorrt_modelopt_source import READABLE_ALGOS
from bitsmith.compile.tensorrt_names import LINEARS
from bitsmith.compile.tensorrt_quantization import SQ_PER_CHANNEL, W4A8_AWQ, W4A16_AWQ, W8A16
from bitsmith.compile.tensorrt_release import DEFAULT_RELEASE, Release
from bitsmith.compile.tensorrt_source import ExportSource
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Fallback


@dataclass(frozen=True, slots=True)
class UnifiedSettings:
    """What the user asks for. The backend has no KV scales: ones is all it does."""

    release: Release = DEFAULT_RELEASE
    tp_size: int = 1
    pp_size: int = 1
    kv_cache: KvCacheChoice = "auto"
    kv_scale: KvScaleChoice = "calibrated"
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class UnifiedPlan:
    """Resolved. excludes: Hugging Face module names that stay dense."""

    decoder: DecoderConfig
    quant_algo: str | None
    kv_algo: str | None
    group_size: int
    excludes: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]


def plan_unified(source: ExportSource, settings: UnifiedSettings) -> UnifiedPlan:
    """Raises Refused for what the backend has no method for; writes nothing."""
    decoder = read_decoder_config(source.config)
    scheme = source.scheme
    assert scheme.quant_algo in READABLE_ALGOS, scheme.quant_algo
    if scheme.quant_algo == SQ_PER_CHANNEL:
        raise Refused(
            f"{source.path} has INT8 activations, which the PyTorch backend has no linear method for. "
            "Use --target tensorrt-llm (1.2.1 or older), or an FP8 scheme."
        )
    if not scheme.is_symmetric:
        raise Refused(
            f"{source.path} has zero points; the PyTorch backend's 4-bit kernel is called without zeros. "
            "Quantize with --symmetric."
        )
    if scheme.quant_algo == W4A8_AWQ and scheme.group_size != 128:
        raise Refused(f"W4A8 takes groups of 128, not {scheme.group_size}; quantize again.")
    _check_parallel(decoder, settings)
    kv_algo = _resolve_kv(source, settings.kv_cache)
    fallbacks = tuple(_fallbacks(source, kv_algo, settings.kv_scale))
    if settings.is_strict and fallbacks:
        first = fallbacks[0]
        raise Refused(f"--strict: {first.where} would be {first.done}, not {first.asked}: {first.reason}.")
    excludes = ("lm_head", "model.embed_tokens", *_dense_modules(source, decoder))
    is_quantized = scheme.quant_algo is not None
    return UnifiedPlan(
        decoder, scheme.quant_algo, kv_algo, scheme.group_size, excludes if is_quantized else (), fallbacks
    )


def _check_parallel(decoder: DecoderConfig, settings: UnifiedSettings) -> None:
    tp_size = settings.tp_size
    if tp_size < 1 or settings.pp_size < 1:
        raise Refused("Parallel sizes must be 1 or more.")
    if decoder.num_heads % tp_size or decoder.intermediate_size % tp_size:
        raise Refused(
            f"--tensor-parallel {tp_size} does not divide {decoder.num_heads} heads and "
            f"{decoder.intermediate_size} MLP columns; choose a divisor of both."
        )
    if decoder.num_kv_heads % tp_size and tp_size % decoder.num_kv_heads:
        raise Refused(
            f"{decoder.num_kv_heads} KV heads can be neither split over nor repeated for {tp_size} ranks."
        )


def _resolve_kv(source: ExportSource, choice: KvCacheChoice) -> str | None:
    if choice in ("int8", "fp32"):
        raise Refused(f"--kv-cache {choice} is not established for this backend; use fp8, bf16 or auto.")
    if choice == "auto":
        if source.scheme.kv_algo not in (None, "FP8"):
            raise Refused(
                f"{source.path} declares a {source.scheme.kv_algo} KV cache, not established for the "
                "PyTorch backend; use --kv-cache fp8 or bf16."
            )
        return source.scheme.kv_algo
    return "FP8" if choice == "fp8" else None


def _fallbacks(source: ExportSource, kv_algo: str | None, kv_scale: KvScaleChoice) -> Iterator[Fallback]:
    if kv_algo == "FP8" and kv_scale == "calibrated" and source.kv_scales(0) is not None:
        reason = "TensorRT-LLM's PyTorch backend ignores FP8 KV scales"
        yield Fallback("kv_cache", "calibrated scales", "a scale of 1.0 for every layer", reason)
    if source.scheme.quant_algo == W8A16:
        first = source.linear("model.layers.0.mlp.down_proj")
        if isinstance(first, WeightOnlyLinear) and not first.is_per_channel:
            reason = "this backend has one scale for each output channel"
            yield Fallback("weights", "scales as quantized", "rounded again for each channel", reason)


def _dense_modules(source: ExportSource, decoder: DecoderConfig) -> Iterator[str]:
    """Raises Refused where q, k, v or gate, up are not all quantized: they are fused when loaded."""
    for layer in range(decoder.num_layers):
        groups = [LINEARS["attention.qkv"], (*LINEARS["mlp.fc"], *LINEARS["mlp.gate"])]
        groups += [LINEARS["attention.dense"], LINEARS["mlp.proj"]]
        for group in groups:
            modules = [f"model.layers.{layer}.{part}" for part in group]
            dense = [module for module in modules if not source.is_quantized(module)]
            if dense and len(dense) != len(modules):
                raise Refused(
                    f"{', '.join(modules)} are fused when loaded, but {', '.join(dense)} is not quantized. "
                    "Quantize all of them, or none."
                )
            yield from dense


def needs_ones(algo: str | None, leaf: str) -> bool:
    """Whether a linear must have a pre_quant_scale because the backend reads it without asking."""
    return algo in (W4A16_AWQ, W4A8_AWQ) and leaf in ("o_proj", "down_proj")
