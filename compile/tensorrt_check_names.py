"""Names, dtypes and shapes of one rank file against the layout tables, with a hint for each mistake."""

from collections.abc import Iterator

from bitsmith.compile.tensor_file import TensorFile
from bitsmith.compile.tensorrt_finding import Finding, refuse, warn
from bitsmith.compile.tensorrt_layout import (
    HARMLESS_SUFFIXES,
    Specs,
    TensorSpec,
    checkpoint_tensors,
    module_name,
    processed_weight_only,
)
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_quantization import WEIGHT_ONLY
from bitsmith.compile.tensorrt_release import Release

_QUANTIZED_AT_BUILD = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight", "gate.weight")


def expected_tensors(model: EngineModel, rank: int, release: Release, file: TensorFile) -> Specs:
    """The layout's tensors; weight-only linears that are int8 in the file are expected in that form."""
    specs = checkpoint_tensors(model, rank, release)
    algo = model.quant.quant_algo
    if algo not in WEIGHT_ONLY:
        return specs
    for index in range(model.layers_per_rank):
        for linear in model.linears():
            prefix = module_name(index, linear.name)
            if file.header.get(f"{prefix}.weight", ("", ()))[0] == "int8":
                processed = processed_weight_only(model, linear, algo)
                specs |= {f"{prefix}.{suffix}": spec for suffix, spec in processed.items()}
    return specs


def check_names(model: EngineModel, rank: int, release: Release, file: TensorFile) -> Iterator[Finding]:
    """Everything about one rank file that its header tells."""
    specs = expected_tensors(model, rank, release, file)
    for name, spec in specs.items():
        where = f"{file.path.name}: {name}"
        if name not in file.header:
            yield refuse("tensor-missing", where, f"is required, {_describe(spec)}; {_missing_hint(name)}")
            continue
        dtype, shape = file.header[name]
        if dtype not in spec.dtypes:
            text = f"is {dtype}, must be {' or '.join(spec.dtypes)}; convert it."
            yield refuse("tensor-dtype", where, text)
        if shape != spec.shape:
            text = f"is {list(shape)}, must be {list(spec.shape)}; {_shape_hint(name, shape, spec, model)}"
            yield refuse("tensor-shape", where, text)
    for name in sorted(set(file.header) - set(specs)):
        yield from _check_extra(model, name, f"{file.path.name}: {name}")


def _check_extra(model: EngineModel, name: str, where: str) -> Iterator[Finding]:
    if name.endswith(HARMLESS_SUFFIXES):
        return
    is_weight_only = model.quant.quant_algo in WEIGHT_ONLY
    if is_weight_only and any(part in name for part in _QUANTIZED_AT_BUILD):
        text = (
            "its name contains a weight's name, so the loader would quantize the scale itself; weight-only "
            "checkpoints hold plain weights, or int8 weights with per_channel_scale."
        )
        yield refuse("weight-only-scale", where, text)
    elif name == "lm_head.weight" and model.share_embedding_table:
        text = "is not loaded, because share_embedding_table is true; the embedding serves as the head."
        yield warn("tensor-extra", where, text)
    else:
        yield warn("tensor-extra", where, "is not a tensor of this configuration; the loader ignores it.")


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtypes[0]} {list(spec.shape)}"


def _missing_hint(name: str) -> str:
    if name.endswith("prequant_scaling_factor"):
        return "pre_quant_scale is true: write ones where no scale is wanted, or set it to false."
    if name.endswith("kv_cache_scaling_factor"):
        return "kv_cache_quant_algo asks for it on every layer: calibrate, or write 1.0."
    if name.endswith(".zero"):
        return "has_zero_point is true: write it, or set it to false for symmetric weights."
    if name == "lm_head.weight":
        return "write a copy of the embedding where the model ties them."
    return "write it, or correct the configuration that asks for it."


def _shape_hint(name: str, shape: tuple[int, ...], spec: TensorSpec, model: EngineModel) -> str:
    want = spec.shape
    if shape == () and want == (1,):
        return "reshape the scalar to [1]."
    if len(want) == 2 and shape == want[::-1]:
        return "it looks transposed."
    if name.endswith("attention.qkv.weight") and len(shape) == 2 and model.tp_size > 1:
        whole = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
        if shape[0] in (whole, whole // 2):
            return "it looks unsplit: cut q, k and v each into tp_size parts, then join."
    if "int8" in spec.dtypes and len(shape) == 2 and shape == (2 * want[0], want[1]):
        return "it looks unpacked: two adjacent output rows share a byte."
    if name.endswith("weights_scaling_factor") and len(want) == 2 and len(shape) == 2 and shape[0] == want[0]:
        return "group_size in the configuration does not fit these scales."
    if name == "lm_head.weight":
        return "pad the vocabulary with zero rows to a multiple of tp_size, then split."
    return "compare the configuration with the source model and export again."
