"""What TensorRT-LLM's loader makes of checkpoint tensors at build time: names, dtypes and shapes.

Used to compare a checkpoint with the parameter lists that TensorRT-LLM itself enumerates. Weights keep
their number of bytes; how they are permuted for a GPU architecture is the loader's affair.
"""

from bitsmith.compile.tensorrt_layout import F8, F32, TensorSpec, checkpoint_tensors
from bitsmith.compile.tensorrt_model import EngineModel
from bitsmith.compile.tensorrt_quantization import W4A8_AWQ, W4A16, W4A16_AWQ, WEIGHT_ONLY
from bitsmith.compile.tensorrt_release import Release

EngineParameters = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)

_QUANTIZED_AT_BUILD = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight", "gate.weight")


def engine_parameters(model: EngineModel, rank: int, release: Release) -> EngineParameters:
    """The engine's parameters for a checkpoint of this configuration, as 0.14 enumerates them."""
    specs = checkpoint_tensors(model, rank, release)
    present = {name: (spec.dtypes[0], spec.shape) for name, spec in specs.items()}
    return lay_out(model, present, release)


def lay_out(model: EngineModel, tensors: EngineParameters, release: Release) -> EngineParameters:
    """Apply the loader's rules to a checkpoint's tensors. tensors: name -> (dtype, shape) as on disk."""
    parameters: EngineParameters = {}
    for name, (dtype, shape) in tensors.items():
        parameters |= _lay_out_tensor(model, name, TensorSpec((dtype,), shape), release)
    return parameters


def _lay_out_tensor(model: EngineModel, name: str, spec: TensorSpec, release: Release) -> EngineParameters:
    algo, dtype, shape = model.quant.quant_algo, spec.dtypes[0], spec.shape
    prefix, _, suffix = name.rpartition(".")
    if algo in (W4A16_AWQ, W4A8_AWQ) and ".layers." in name:
        return _lay_out_awq(model, prefix, suffix, spec, release)
    is_weight_only = algo in WEIGHT_ONLY and name.endswith(_QUANTIZED_AT_BUILD)
    if is_weight_only and dtype != "int8" and not model.quant.is_excluded(prefix):
        rows, columns = shape
        packed = rows // 2 if algo == W4A16 else rows
        return {name: ("int8", (columns, packed)), f"{prefix}.per_channel_scale": (model.dtype, (rows,))}
    return {name: (F8 if dtype == F8 else dtype, shape)}


def _lay_out_awq(
    model: EngineModel, prefix: str, suffix: str, spec: TensorSpec, release: Release
) -> EngineParameters:
    name, dtype, shape = f"{prefix}.{suffix}", spec.dtypes[0], spec.shape
    is_w4a8 = model.quant.quant_algo == W4A8_AWQ
    if suffix == "weight" and dtype in ("int8", "uint8"):
        # [out / 2, in] bytes -> [in, out / 4] words of 16 bits
        return {name: (model.dtype, (shape[1], shape[0] // 2))}
    if suffix == "weights_scaling_factor":
        return {name: (model.dtype, (shape[1], shape[0]))}
    if suffix == "prequant_scaling_factor":
        return {name: (model.dtype, (1, shape[0]))}
    if is_w4a8 and suffix == "weights_scaling_factor_2":
        return {f"{prefix}.alpha": (F32, (1,))}
    if is_w4a8 and suffix == "activation_scaling_factor":
        return {} if release.is_legacy else {name: (F32, (1,))}
    return {name: (dtype, shape)}
