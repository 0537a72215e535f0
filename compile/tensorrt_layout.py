"""The tensors of a TensorRT-LLM checkpoint: name -> dtypes and shape, for each rank.

Pure functions of the configuration; docs/tensorrt-llm.md says where each rule was read. What the loader
makes of these tensors at build time is in tensorrt_engine_layout.py.
"""

from dataclasses import dataclass

from bitsmith.compile.tensorrt_model import EngineModel, LinearShape
from bitsmith.compile.tensorrt_quantization import (
    FP8,
    FP8_ROWWISE,
    SQ_PER_CHANNEL,
    SQ_PLUGINS,
    W4A8_AWQ,
    W4A16_AWQ,
    W4A16_GPTQ,
    WEIGHT_ONLY,
)
from bitsmith.compile.tensorrt_release import Release

F8 = "float8_e4m3fn"
F32 = "float32"

# Written by producers and merged, or computed, by the loader: never wrong to have.
HARMLESS_SUFFIXES = (
    ".attention.k_cache_scaling_factor",
    ".attention.v_cache_scaling_factor",
    ".attention.kv_cache_rcp_scaling_factor",
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtypes: those that the loader takes, the preferred one first."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


Specs = dict[str, TensorSpec]


def _spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec((dtype,), shape)


def module_name(layer: int, name: str) -> str:
    return f"transformer.layers.{layer}.{name}"


def module_algo(model: EngineModel, layer: int, name: str, release: Release) -> str | None:
    """The algorithm that the loader applies to a linear. layer: index in the whole model."""
    quant = model.quant
    if quant.quant_algo is None or quant.is_excluded(module_name(layer, name)):
        return None
    if quant.quant_algo == FP8_ROWWISE and (quant.use_meta_recipe or release.is_meta_rowwise):
        is_inner = 0 < layer < model.num_layers - 1
        return FP8_ROWWISE if is_inner and name.startswith("mlp.") else None
    return quant.quant_algo


def checkpoint_tensors(model: EngineModel, rank: int, release: Release) -> Specs:
    """All tensors that rank `rank` must have, by name."""
    specs: Specs = {}
    if model.has_embedding(rank):
        specs["transformer.vocab_embedding.weight"] = embedding_spec(model)
    first = model.pp_rank(rank) * model.layers_per_rank
    for index in range(model.layers_per_rank):
        specs |= _layer_tensors(model, first + index, index, release)
    if model.has_head(rank):
        specs["transformer.ln_f.weight"] = _spec(model.dtype, model.hidden_size)
        if not is_head_shared(model):
            rows = model.padded_vocab_size // model.tp_size
            specs["lm_head.weight"] = _spec(model.dtype, rows, model.hidden_size)
    return specs


def is_head_shared(model: EngineModel) -> bool:
    """Whether lm_head is absent; a last pipeline rank without an embedding always needs its own copy."""
    return model.share_embedding_table and model.pp_size == 1


def embedding_spec(model: EngineModel) -> TensorSpec:
    if not model.use_parallel_embedding:
        return _spec(model.dtype, model.vocab_size, model.hidden_size)
    if model.embedding_sharding_dim == 0:
        return _spec(model.dtype, model.padded_vocab_size // model.tp_size, model.hidden_size)
    return _spec(model.dtype, model.vocab_size, model.hidden_size // model.tp_size)


def _layer_tensors(model: EngineModel, layer: int, index: int, release: Release) -> Specs:
    """layer: index in the whole model (decides quantization); index: in this rank (decides the name)."""
    specs = {module_name(index, f"{norm}.weight"): _spec(model.dtype, size) for norm, size in model.norms()}
    for linear in model.linears():
        prefix = module_name(index, linear.name)
        algo = module_algo(model, layer, linear.name, release)
        specs |= {f"{prefix}.{suffix}": spec for suffix, spec in linear_tensors(model, linear, algo).items()}
        if linear.has_bias:
            specs[f"{prefix}.bias"] = _spec(model.dtype, linear.out_features)
    if model.quant.quant_algo in SQ_PLUGINS:
        specs |= _smoothquant_plugin_tensors(model, index)
    if model.quant.kv_cache_quant_algo is not None:
        specs[module_name(index, "attention.kv_cache_scaling_factor")] = _spec(F32, 1)
    return specs


def linear_tensors(model: EngineModel, linear: LinearShape, algo: str | None) -> Specs:
    """Suffix -> spec of one linear; weight-only modes in their plain form (quantized at build)."""
    rows, columns = linear.out_features, linear.in_features
    if algo is None or algo in WEIGHT_ONLY:
        return {"weight": _spec(model.dtype, rows, columns)}
    if algo == FP8:
        return {
            "weight": TensorSpec((F8, "int8"), (rows, columns)),
            "weights_scaling_factor": _spec(F32, 1),
            "activation_scaling_factor": _spec(F32, 1),
        }
    if algo == FP8_ROWWISE:
        return {
            "weight": TensorSpec((F8, "int8"), (rows, columns)),
            "per_channel_scale": _spec(F32, rows),
        }
    if algo == SQ_PER_CHANNEL:
        return {
            "weight": _spec("int8", rows, columns),
            "weights_scaling_factor": _spec(F32, rows),
            "activation_scaling_factor": _spec(F32, 1),
            "prequant_scaling_factor": _spec(model.dtype, columns),
        }
    if algo in SQ_PLUGINS:
        return _smoothquant_plugin_linear(linear, algo)
    return _groupwise_tensors(model, linear, algo)


def _groupwise_tensors(model: EngineModel, linear: LinearShape, algo: str) -> Specs:
    rows, columns = linear.out_features, linear.in_features
    num_groups = columns // model.quant.group_size
    if algo == W4A16_GPTQ:  # already in the engine's own layout
        specs = {
            "weight": TensorSpec((model.dtype, "float16", "bfloat16"), (columns, rows // 4)),
            "weights_scaling_factor": _spec(model.dtype, num_groups, rows),
        }
    else:
        assert algo in (W4A16_AWQ, W4A8_AWQ), algo
        specs = {
            "weight": TensorSpec(("int8", "uint8"), (rows // 2, columns)),
            "weights_scaling_factor": TensorSpec((F32, model.dtype), (rows, num_groups)),
        }
    if model.quant.pre_quant_scale:
        specs["prequant_scaling_factor"] = _spec(model.dtype, columns)
    if model.quant.has_zero_point:
        specs["zero"] = _spec(model.dtype, num_groups, rows)
    if algo == W4A8_AWQ:
        specs["activation_scaling_factor"] = _spec(F32, 1)
        specs["weights_scaling_factor_2"] = _spec(F32, 1)
    return specs


def processed_weight_only(model: EngineModel, linear: LinearShape, algo: str) -> Specs:
    """The other form of W8A16 and W4A16: already quantized and laid out for one GPU architecture."""
    columns = linear.out_features if algo == "W8A16" else linear.out_features // 2
    return {
        "weight": _spec("int8", linear.in_features, columns),
        "per_channel_scale": _spec(model.dtype, linear.out_features),
    }


def _smoothquant_plugin_linear(linear: LinearShape, algo: str) -> Specs:
    is_per_channel = "PER_CHANNEL" in algo or linear.name == "attention.qkv"
    specs = {
        "weight": _spec("int8", linear.out_features, linear.in_features),
        "per_channel_scale": _spec(F32, 1, linear.out_features if is_per_channel else 1),
    }
    if not algo.endswith("PER_TOKEN_PLUGIN"):
        specs["act_scale"] = _spec(F32, 1, 1)
    if not linear.is_column:
        specs["smoother"] = _spec(F32, 1, linear.in_features)
    return specs


def _smoothquant_plugin_tensors(model: EngineModel, index: int) -> Specs:
    specs = {
        module_name(index, f"{norm}.scale_to_int"): _spec(model.dtype, 1)
        for norm, _ in model.norms()
        if not norm.startswith("attention.")
    }
    if not str(model.quant.quant_algo).endswith("PER_TOKEN_PLUGIN"):
        for block in ("attention", "mlp"):
            specs[module_name(index, f"{block}.quantization_scaling_factor")] = _spec(F32, 1)
    return specs
