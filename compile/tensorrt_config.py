"""Reading a TensorRT-LLM `config.json`: the model it describes, and what is wrong with it.

Knows the loader's required keys, defaults and types; reads no tensors.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_model import ARCHITECTURES, SINCE_1_0, EngineModel, Family
from bitsmith.compile.tensorrt_quantization import QUANT_KEYS, read_quant_config
from bitsmith.compile.tensorrt_release import Release

Body = Mapping[str, Any]

_REQUIRED_INTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL_INTS = ("num_key_value_heads", "head_size", "intermediate_size")
_LARGEST_SIZE = 1 << 30
_LARGEST = {"num_hidden_layers": 10_000, "tp_size": 1024, "pp_size": 1024, "cp_size": 1024}
_DTYPES = ("bfloat16", "float16", "float32")


def read_model(body: Body, release: Release) -> tuple[EngineModel | None, list[Finding]]:
    """The model, or None where the configuration is too broken to name its tensors."""
    findings = list(_check_required(body))
    if not findings:
        findings += _check_architecture(body, release)
    if any(finding.code in ("config-missing", "config-type", "architecture") for finding in findings):
        return None, findings
    model = _model(body)
    findings += [*_check_sizes(model, body), *_check_family(model, body), *_check_quantization_keys(body)]
    is_broken = any(finding.code in ("mapping", "sizes", "quant-type") for finding in findings)
    return (None if is_broken else model), findings


def _check_required(body: Body) -> Iterator[Finding]:
    for key in ("architecture", "dtype"):
        if not isinstance(body.get(key), str):
            yield refuse("config-missing", f"config.json: {key}", "is required and must be text; write it.")
    for key in _REQUIRED_INTS:
        yield from _check_size(body, key, "config-missing")
    for key in _OPTIONAL_INTS:
        if body.get(key) is not None:
            yield from _check_size(body, key, "config-type")
    if body.get("dtype") not in _DTYPES and isinstance(body.get("dtype"), str):
        text = f"{body['dtype']!r} is not one of {', '.join(_DTYPES)}."
        yield refuse("config-type", "config.json: dtype", text)
    mapping, quantization = body.get("mapping", {}), body.get("quantization", {})
    for key, section in (("mapping", mapping), ("quantization", quantization)):
        if not isinstance(section, Mapping | None):
            yield refuse("config-type", f"config.json: {key}", "must be an object.")
    if isinstance(mapping, Mapping):
        for key in ("tp_size", "pp_size", "cp_size"):
            if key in mapping:
                yield from _check_size(mapping, key, "config-type", "mapping.")
    if isinstance(quantization, Mapping):
        yield from _check_quantization_types(quantization)


def _check_quantization_types(section: Body) -> Iterator[Finding]:
    where = "config.json: quantization."
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if not isinstance(section.get(key), str | None):
            yield refuse("config-type", f"{where}{key}", "must be a name, or null.")
    if not isinstance(section.get("exclude_modules"), list | None):
        yield refuse("config-type", f"{where}exclude_modules", "must be a list of patterns, or absent.")
    clamp = section.get("clamp_val")
    is_pair = isinstance(clamp, list) and len(clamp) == 2 and all(isinstance(x, int | float) for x in clamp)
    if clamp is not None and not is_pair:
        yield refuse("config-type", f"{where}clamp_val", "must be two numbers, or null.")
    if "group_size" in section:
        yield from _check_size(section, "group_size", "config-type", "quantization.")


def _check_size(body: Body, key: str, code: str, where: str = "") -> Iterator[Finding]:
    value, limit = body.get(key), _LARGEST.get(key, _LARGEST_SIZE)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        text = f"must be an integer from 1 to {limit}, not {value!r}; take it from the source model."
        yield refuse(code, f"config.json: {where}{key}", text)


def _check_architecture(body: Body, release: Release) -> Iterator[Finding]:
    name, where = body["architecture"], "config.json: architecture"
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        yield refuse("architecture", where, f"{name!r} is not checked here; known ones are {known}.")
    elif ARCHITECTURES[name] in SINCE_1_0 and release.is_legacy:
        text = f"{name} came to the engine flow with 1.0, not in {release}; build with 1.0 to 1.2.1."
        yield refuse("architecture-release", where, text)


def _model(body: Body) -> EngineModel:
    family: Family = ARCHITECTURES[body["architecture"]]
    mapping = body.get("mapping") or {}
    num_heads, hidden_size = body["num_attention_heads"], body["hidden_size"]
    is_gemma = family in ("gemma2", "gemma3")
    return EngineModel(
        architecture=body["architecture"],
        family=family,
        dtype=body["dtype"],
        hidden_size=hidden_size,
        num_layers=body["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=body.get("num_key_value_heads") or num_heads,
        head_size=body.get("head_size") or hidden_size // num_heads,
        intermediate_size=body.get("intermediate_size") or 4 * hidden_size,
        vocab_size=body["vocab_size"],
        tp_size=mapping.get("tp_size", 1),
        pp_size=mapping.get("pp_size", 1),
        attn_bias=bool(body.get("attn_bias", family == "qwen2")),
        mlp_bias=bool(body.get("mlp_bias", False)),
        qk_layernorm=bool(body.get("qk_layernorm", False)) or family in ("qwen3", "gemma3"),
        share_embedding_table=bool(body.get("share_embedding_table", is_gemma)),
        use_parallel_embedding=bool(body.get("use_parallel_embedding", False)),
        embedding_sharding_dim=body.get("embedding_sharding_dim", 0),
        quant=read_quant_config(body.get("quantization") or {}),
    )


def _check_sizes(model: EngineModel, body: Body) -> Iterator[Finding]:
    mapping = body.get("mapping") or {}
    tp_size, pp_size = model.tp_size, model.pp_size
    world_size, cp_size = mapping.get("world_size", 1), mapping.get("cp_size", 1)
    if world_size != tp_size * pp_size * cp_size:
        text = f"world_size {world_size} is not tp {tp_size} × pp {pp_size} × cp {cp_size}; correct it."
        yield refuse("mapping", "config.json: mapping", text)
    for key, value in (
        ("num_attention_heads", model.num_heads),
        ("intermediate_size", model.intermediate_size),
    ):
        if value % tp_size:
            text = f"{value} does not divide by tp_size {tp_size}; export with another tensor-parallel size."
            yield refuse("sizes", f"config.json: {key}", text)
    num_kv_heads = model.num_kv_heads
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        text = f"{num_kv_heads} heads can neither be split over nor repeated for tp_size {tp_size}."
        yield refuse("sizes", "config.json: num_key_value_heads", text)
    if model.num_layers % pp_size:
        text = f"{model.num_layers} layers do not divide by pp_size {pp_size}; export with another one."
        yield refuse("sizes", "config.json: num_hidden_layers", text)
    if model.num_heads % num_kv_heads:
        text = (
            f"{num_kv_heads} does not divide num_attention_heads {model.num_heads}; take it from the model."
        )
        yield refuse("sizes", "config.json: num_key_value_heads", text)


def _check_family(model: EngineModel, body: Body) -> Iterator[Finding]:
    if body.get("position_embedding_type") != "rope_gpt_neox":
        text = "must be 'rope_gpt_neox' for this architecture (absent means 'learned_absolute'); write it."
        yield refuse("position-embedding", "config.json: position_embedding_type", text)
    if model.family in ("qwen2", "qwen3"):
        yield from _check_qwen(model, body)
    if model.is_gemma:
        yield from _check_gemma(model, body)
    dim = model.embedding_sharding_dim
    if dim not in (0, 1):
        yield refuse("config-value", "config.json: embedding_sharding_dim", f"must be 0 or 1, not {dim!r}.")
    is_whole = model.world_size == 1
    if model.share_embedding_table and not is_whole and not (model.use_parallel_embedding and dim == 0):
        text = (
            "a shared table on several ranks needs use_parallel_embedding with embedding_sharding_dim 0; "
            "write a copy of the head instead (share_embedding_table false)."
        )
        yield refuse("shared-embedding", "config.json: share_embedding_table", text)


def _check_qwen(model: EngineModel, body: Body) -> Iterator[Finding]:
    for key in ("qwen_type", "seq_length"):
        if key not in body:
            text = "is read by the Qwen model code and has no default; take it from the source model."
            yield refuse("config-missing-qwen", f"config.json: {key}", text)
    if "rotary_base" not in body:
        text = "is absent, so 10000 is used; Qwen models usually have 1000000: write the model's rope_theta."
        yield refuse("config-missing-qwen", "config.json: rotary_base", text)
    qwen_type = body.get("qwen_type", model.family)
    if qwen_type != model.family:
        text = f"{qwen_type!r} does not belong to {model.architecture}; write {model.family!r}."
        yield refuse("qwen-type", "config.json: qwen_type", text)
    if model.family == "qwen3" and body.get("attn_bias", True):
        text = "must be false: Qwen3 has no attention bias and the default is true."
        yield refuse("qwen3-bias", "config.json: attn_bias", text)
    if model.family == "qwen3" and not body.get("qk_layernorm", False):
        text = "must be true: Qwen3 normalises queries and keys."
        yield refuse("qk-layernorm", "config.json: qk_layernorm", text)


def _check_gemma(model: EngineModel, body: Body) -> Iterator[Finding]:
    needed = ["query_pre_attn_scalar"]
    if model.family == "gemma3":
        needed += ["sliding_window", "sliding_window_pattern", "rope_local_base_freq"]
    else:
        needed += ["attn_logit_softcapping", "final_logit_softcapping"]
    for key in needed:
        if key not in body:
            text = f"is needed by {model.architecture}; take it from the source model."
            yield refuse("config-missing-gemma", f"config.json: {key}", text)
    if model.family == "gemma3" and not body.get("qk_layernorm", False):
        text = "must be true: Gemma 3 normalises queries and keys."
        yield refuse("qk-layernorm", "config.json: qk_layernorm", text)
    if model.tp_size > 1 and not model.use_parallel_embedding:
        text = "Gemma on several ranks always uses a parallel embedding; write true and split it."
        yield refuse("gemma-embedding", "config.json: use_parallel_embedding", text)


def _check_quantization_keys(body: Body) -> Iterator[Finding]:
    quantization = body.get("quantization") or {}
    for key in sorted(set(quantization) - set(QUANT_KEYS)):
        text = "is unknown to QuantConfig, whose constructor raises TypeError; remove it."
        yield refuse("quant-key", f"config.json: quantization.{key}", text)
    if body.get("logits_dtype", "float32") not in ("float32", "float16"):
        yield warn("logits-dtype", "config.json: logits_dtype", "is neither float32 nor float16.")
