"""The validator of unified checkpoints for TensorRT-LLM's PyTorch backend."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bitsmith.compile.decoder_config import DecoderConfig, read_decoder_config
from bitsmith.compile.tensorrt_finding import CheckReport, Finding, collapse, refuse, warn
from bitsmith.compile.tensorrt_quantization import W4A8_AWQ, W4A16_AWQ, W8A16
from bitsmith.compile.tensorrt_release import Release
from bitsmith.compile.tensorrt_unified_layout import (
    ALIASES,
    NVFP4,
    UNCHECKED_UNIFIED,
    UNIFIED_ALGOS,
    UNIFIED_KV_ALGOS,
    UnifiedSpec,
    unified_tensors,
)
from bitsmith.compile.tensorrt_unified_source import check_unified_source
from bitsmith.compile.tensorrt_unified_values import check_unified_values
from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.quantize.modelopt_config import QUANT_CONFIG_NAME, inline_section, modelopt_section

_SECTION_KEYS = (
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "has_zero_point",
    "pre_quant_scale",
    "exclude_modules",
    "quantized_layers",
    "smoothquant_val",
    "clamp_val",
)


def check_unified_checkpoint(path: Path, release: Release, source: Path | None = None) -> CheckReport:
    """Check a Hugging Face directory for the PyTorch backend. source: the dense model it came from."""
    findings = tuple(collapse(_check(path, release, source)))
    return CheckReport(str(path), f"a checkpoint for TensorRT-LLM {release}'s PyTorch backend", findings)


def _check(path: Path, release: Release, source: Path | None) -> Iterator[Finding]:
    if (path / "rank0.safetensors").exists():
        text = (
            "is a TensorRT-LLM checkpoint for trtllm-build; the PyTorch backend reads Hugging Face's layout."
        )
        yield refuse("format", "rank0.safetensors", text)
        return
    try:
        reader = CheckpointReader(path)
        section = modelopt_section(reader)
        decoder = read_decoder_config(reader.config)
    except Refused as error:
        yield refuse("unreadable", "config.json", str(error))
        return
    findings = [*_check_method(reader, section), *check_section(section or {})]
    yield from findings
    if any(finding.code in ("method", "quant-algo", "group-size", "exclude-type") for finding in findings):
        return
    named = list(_check_tensors(reader, decoder, section or {}))
    yield from named
    algo = unified_algo(section or {})
    yield from check_unified_values(reader, algo, section or {})
    if source is not None and not named:
        yield from check_unified_source(path, source)


def unified_algo(section: dict[str, Any]) -> str | None:
    algo = section.get("quant_algo")
    return None if algo is None else ALIASES.get(str(algo), str(algo))


def _check_method(reader: CheckpointReader, section: dict[str, Any] | None) -> Iterator[Finding]:
    inline = reader.config.get("quantization_config")
    if section is None and inline is not None:
        method = inline.get("quant_method")
        text = (
            f"quant_method {method!r} is not checked here, and the backend reads few of its forms (GPTQ and "
            "AWQ files not at all); export it with --target tensorrt-llm-pytorch."
        )
        yield refuse("method", "config.json: quantization_config", text)
    inlined = inline_section(reader.config)
    if section is not None and inlined is not None and section is not inlined:
        for key in ("quant_algo", "kv_cache_quant_algo"):
            if (reader.path / QUANT_CONFIG_NAME).is_file() and section.get(key) != inlined.get(key):
                text = (
                    f"{key} is {inlined.get(key)!r}, {QUANT_CONFIG_NAME} says {section.get(key)!r} and "
                    "decides; make them agree."
                )
                yield warn("inline-differs", "config.json: quantization_config", text)


def check_section(section: dict[str, Any]) -> Iterator[Finding]:
    """The quantization section by itself, whatever its values are."""
    where = QUANT_CONFIG_NAME
    algo, kv_algo = unified_algo(section), section.get("kv_cache_quant_algo")
    if not isinstance(section.get("exclude_modules") or [], list):
        yield refuse("exclude-type", f"{where}: exclude_modules", "must be a list of patterns.")
    for key in sorted(set(section) - set(_SECTION_KEYS)):
        yield warn("quant-key", f"{where}: {key}", "is not a key that the backend reads; remove it.")
    if algo is not None and algo not in UNIFIED_ALGOS:
        if algo in UNCHECKED_UNIFIED:
            text = f"{algo!r} exists, but its tensors are not known well enough to check them here."
        else:
            text = (
                f"{algo!r} has no linear method in the PyTorch backend (ValueError: unsupported quant mode); "
                f"known here: {', '.join(UNIFIED_ALGOS)}."
            )
        yield refuse("quant-algo", f"{where}: quant_algo", text)
    if kv_algo is not None and kv_algo not in UNIFIED_KV_ALGOS:
        text = (
            f"{kv_algo!r} is not one of {', '.join(UNIFIED_KV_ALGOS)}; leave it null for the model's dtype."
        )
        yield refuse("kv-algo", f"{where}: kv_cache_quant_algo", text)
    if algo in (W4A16_AWQ, W4A8_AWQ):
        yield from _check_awq(section, algo)
    if kv_algo == "FP8":
        text = (
            "this backend ignores k_scale and v_scale and stores keys and values with a scale of 1.0; values "
            "beyond 448 saturate. Judge quality with that, not with the calibrated scales."
        )
        yield warn("kv-scales-ignored", f"{where}: kv_cache_quant_algo", text)


def _check_awq(section: dict[str, Any], algo: str) -> Iterator[Finding]:
    group_size = section.get("group_size")
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        text = f"must be the number of columns per scale, not {group_size!r}; write it."
        yield refuse("group-size", f"{QUANT_CONFIG_NAME}: group_size", text)
    elif algo == W4A8_AWQ and group_size != 128:
        text = f"W4A8_AWQ takes groups of 128 only, not {group_size}; quantize again."
        yield refuse("group-size-w4a8", f"{QUANT_CONFIG_NAME}: group_size", text)
    if section.get("has_zero_point"):
        text = "must be false: the kernel is called without zeros. Quantize symmetrically."
        yield refuse("zero-point", f"{QUANT_CONFIG_NAME}: has_zero_point", text)
    text = "AWQ does not run on Blackwell GPUs in this backend; serve it on Hopper, Ada or Ampere."
    yield warn("not-on-blackwell", f"{QUANT_CONFIG_NAME}: quant_algo", text)


def linear_shapes(decoder: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """(Hugging Face module name, [out, in]) of every decoder linear."""
    query, kv = decoder.num_heads * decoder.head_size, decoder.num_kv_heads * decoder.head_size
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    for layer in range(decoder.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj", (query, hidden)
        yield f"{prefix}.self_attn.k_proj", (kv, hidden)
        yield f"{prefix}.self_attn.v_proj", (kv, hidden)
        yield f"{prefix}.self_attn.o_proj", (hidden, query)
        yield f"{prefix}.mlp.gate_proj", (inner, hidden)
        yield f"{prefix}.mlp.up_proj", (inner, hidden)
        yield f"{prefix}.mlp.down_proj", (hidden, inner)


def _check_tensors(
    reader: CheckpointReader, decoder: DecoderConfig, section: dict[str, Any]
) -> Iterator[Finding]:
    algo, group_size = unified_algo(section), int(section.get("group_size") or 128)
    excludes = [str(pattern) for pattern in section.get("exclude_modules") or ()]
    for module, shape in linear_shapes(decoder):
        is_excluded = any(fnmatchcase(module, pattern) for pattern in excludes)
        if algo is None or is_excluded:
            dense = UnifiedSpec(("bfloat16", "float16", "float32"), (shape,))
            yield from _check_tensor(reader, f"{module}.weight", dense)
            continue
        specs = unified_tensors(algo, module.rpartition(".")[2], shape, group_size)
        for suffix, spec in specs.items():
            yield from _check_tensor(reader, f"{module}.{suffix}", spec)
    yield from _check_tables(reader, decoder, algo, excludes)
    if section.get("kv_cache_quant_algo") == NVFP4:
        yield from _check_nvfp4_kv(reader, decoder)


def _check_tensor(reader: CheckpointReader, name: str, spec: UnifiedSpec) -> Iterator[Finding]:
    if name not in reader:
        if spec.is_required:
            yield refuse("tensor-missing", name, f"is required ({spec.dtypes[0]}); {_missing_hint(name)}")
        return
    dtype, shape = str(reader.dtype(name)).removeprefix("torch."), reader.shape(name)
    if dtype not in spec.dtypes:
        text = f"is {dtype}, must be {' or '.join(spec.dtypes)}; export it again."
        yield refuse("tensor-dtype", name, text)
    if shape not in spec.shapes:
        text = f"is {list(shape)}, must be {list(spec.shapes[0])}; {_shape_hint(shape, spec)}"
        yield refuse("tensor-shape", name, text)


def _missing_hint(name: str) -> str:
    if name.endswith("pre_quant_scale"):
        return "o_proj and down_proj read it without asking: write ones where there is none."
    return "write it, or add the module to exclude_modules if it is dense."


def _shape_hint(shape: tuple[int, ...], spec: UnifiedSpec) -> str:
    want = spec.shapes[0]
    if len(want) == 2 and shape == want[::-1]:
        return "it looks transposed."
    if "uint8" in spec.dtypes and len(shape) == 2 and shape[0] == 2 * want[0]:
        return "it looks unpacked: two adjacent output rows share a byte."
    return "compare group_size and the source model, and export it again."


def _check_tables(
    reader: CheckpointReader, decoder: DecoderConfig, algo: str | None, excludes: list[str]
) -> Iterator[Finding]:
    vocab = UnifiedSpec(("bfloat16", "float16", "float32"), ((decoder.vocab_size, decoder.hidden_size),))
    yield from _check_tensor(reader, "model.embed_tokens.weight", vocab)
    if not decoder.is_tied or "lm_head.weight" in reader:
        yield from _check_tensor(reader, "lm_head.weight", vocab)
    is_covered = any(fnmatchcase("lm_head", pattern) for pattern in excludes)
    if algo is not None and not is_covered:
        text = 'does not cover lm_head, which would be loaded as quantized; add "lm_head".'
        yield refuse("exclude-head", f"{QUANT_CONFIG_NAME}: exclude_modules", text)
    for name in (
        "model.norm.weight",
        *(f"model.layers.{i}.input_layernorm.weight" for i in range(decoder.num_layers)),
    ):
        if name not in reader:
            yield refuse("tensor-missing", name, "is required; export it again.")
    if algo == W8A16 and any(name.endswith(".pre_quant_scale") for name in reader.names):
        yield warn("tensor-extra", "pre_quant_scale", "is not read in this mode.")


def _check_nvfp4_kv(reader: CheckpointReader, decoder: DecoderConfig) -> Iterator[Finding]:
    for layer in range(decoder.num_layers):
        for name in ("k_proj.k_scale", "v_proj.v_scale"):
            spec = UnifiedSpec(("float32",), ((), (1,)))
            yield from _check_tensor(reader, f"model.layers.{layer}.self_attn.{name}", spec)
