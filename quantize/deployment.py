"""Planning a checkpoint for where it will run: what that target cannot take is refused before work.

Rules are those of docs/tensorrt-llm.md for the two TensorRT-LLM targets. Modules that a target fuses read one
input, and FP8 modules that do share their weight scale already, so nothing more has to be shared here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from bitsmith.core.errors import Refused
from bitsmith.core.scheme import QuantizationScheme

DeploymentTarget = Literal["cpu", "tensorrt-llm", "tensorrt-llm-pytorch", "vllm"]
TARGETS: tuple[DeploymentTarget, ...] = get_args(DeploymentTarget)

_TENSORRT = ("tensorrt-llm", "tensorrt-llm-pytorch")
_FLOAT_KV_ONLY = ("tensorrt-llm-pytorch", "vllm")
_TENSORRT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_TENSORRT_GROUPS = (128, 64)
_OTHER_GROUPS = (128, 64, 32)
KERNEL_BITS = (4, 8)  # of integer weights, in TensorRT-LLM and in vLLM's compressed-tensors kernels
_ROW_PARALLEL = ("o_proj", "down_proj")  # their inputs are split over the ranks, the others' outputs
_UNIT = 64  # TensorRT-LLM's group-wise kernels pad what is no multiple of it

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Deployment:
    """tensor_parallel: ranks that share every layer."""

    target: DeploymentTarget
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise Refused(f"--for {self.target!r} is not known. Valid targets: {', '.join(TARGETS)}.")
        if self.tensor_parallel < 1:
            raise Refused(f"--tensor-parallel must be 1 or more, not {self.tensor_parallel}.")
        if self.target == "cpu" and self.tensor_parallel > 1:
            raise Refused(
                f"--tensor-parallel {self.tensor_parallel}: the native engine runs on one processor. "
                "Leave it out, or name another --for."
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_deployment(
    deployment: Deployment, scheme: QuantizationScheme, shapes: Shapes, config: Mapping[str, Any]
) -> QuantizationScheme:
    """The scheme with a group size that the target takes on every rank. shapes: module -> (out, in).

    Raises Refused naming the setting, the target's reason and the remedy.
    """
    if deployment.target == "cpu":
        return scheme
    if scheme.kv_cache == "int8" and deployment.target in _FLOAT_KV_ONLY:
        raise Refused(
            f"--for {deployment.target} with --kv-cache int8: this target reads FP8 scales only. "
            "Use --kv-cache fp8, or none."
        )
    if scheme.rounds_to_integers and scheme.num_bits not in KERNEL_BITS:
        raise Refused(
            f"--for {deployment.target} with {scheme.name}: this target has kernels for 4-bit and 8-bit "
            f"integers, not for {scheme.num_bits} bits. Use a w4a16 or w8a16 scheme, or --for cpu."
        )
    if deployment.target in _TENSORRT:
        _check_tensorrt(deployment, scheme, config)
        scheme = replace(scheme, signed_scale=False)  # its scales are amax over the end of the grid
    rank_shapes = _rank_shapes(deployment, shapes, config)
    if not scheme.rounds_to_integers:
        return scheme
    if scheme.num_bits == 8 and deployment.target == "tensorrt-llm-pytorch":
        return _per_channel(scheme)
    return _with_group_size(deployment, scheme, rank_shapes)


def _check_tensorrt(deployment: Deployment, scheme: QuantizationScheme, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in _TENSORRT_FAMILIES:
        raise Refused(
            f"--for {deployment.target}: model_type {model_type!r} is not exported to TensorRT-LLM here; "
            f"{', '.join(_TENSORRT_FAMILIES)} are. Choose another --for."
        )
    if scheme.rounds_to_integers and not scheme.symmetric:
        reason = (
            "its zero points are rounded to the model's dtype, so the weights would not come back exactly"
            if deployment.target == "tensorrt-llm"
            else "its 4-bit kernel is called without zero points"
        )
        raise Refused(f"--for {deployment.target} with --asymmetric: {reason}. Use --symmetric.")
    if scheme.method == "smoothquant":
        _check_int8_inputs(deployment, scheme)
    if scheme.num_bits == 8 and scheme.rounds_to_integers and deployment.target == "tensorrt-llm":
        raise Refused(
            f"--for tensorrt-llm with {scheme.name}: trtllm-build rounds 8-bit weights again by itself, so "
            "what is quantized here would not be kept. Use w8a8-fp8 or a 4-bit scheme; without --for the "
            "export is still possible, marked as requantized at build."
        )


def _check_int8_inputs(deployment: Deployment, scheme: QuantizationScheme) -> None:
    if deployment.target == "tensorrt-llm-pytorch":
        raise Refused(
            f"--for {deployment.target} with {scheme.name}: this backend has no linear method with INT8 "
            "inputs. Use --for tensorrt-llm, or an FP8 scheme."
        )
    if scheme.activation_scale == "token":
        raise Refused(
            f"--for {deployment.target} with {scheme.name} and activation_scale token: INT8 inputs are "
            "exported with static scales. Use --activation-scale tensor."
        )


def _rank_shapes(deployment: Deployment, shapes: Shapes, config: Mapping[str, Any]) -> Shapes:
    """(out, in) of each module on one rank. Raises Refused where heads or columns do not divide."""
    ranks = deployment.tensor_parallel
    num_heads = int(config.get("num_attention_heads") or 1)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % ranks:
        raise Refused(f"--tensor-parallel {ranks} does not divide {num_heads} attention heads.")
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise Refused(
            f"--tensor-parallel {ranks}: {num_kv_heads} KV heads can be neither split over the ranks nor "
            "repeated for them; choose a divisor or a multiple."
        )
    result = {}
    for name, (rows, columns) in shapes.items():
        kind = name.rpartition(".")[2]
        if kind in _ROW_PARALLEL:
            result[name] = (rows, _split(columns, ranks, name, "columns"))
        elif kind in ("k_proj", "v_proj"):
            head_size = rows // num_kv_heads
            result[name] = (max(1, num_kv_heads // ranks) * head_size, columns)
        else:
            result[name] = (_split(rows, ranks, name, "rows"), columns)
    return result


def _split(size: int, ranks: int, name: str, what: str) -> int:
    if size % ranks:
        raise Refused(f"--tensor-parallel {ranks} does not divide the {size} {what} of {name}.")
    return size // ranks


def _per_channel(scheme: QuantizationScheme) -> QuantizationScheme:
    if scheme.group_size not in ("auto", "channel"):
        raise Refused(
            f"--for tensorrt-llm-pytorch with group_size {scheme.group_size}: this backend has one scale for "
            "each output channel of 8-bit weights. Use --group-size channel."
        )
    return replace(scheme, group_size="channel")


def _with_group_size(
    deployment: Deployment, scheme: QuantizationScheme, rank_shapes: Shapes
) -> QuantizationScheme:
    """Groups must not cross a rank's border, and the target must have kernels for them."""
    is_tensorrt = deployment.target in _TENSORRT
    known = _TENSORRT_GROUPS if is_tensorrt else _OTHER_GROUPS
    if scheme.group_size == "channel" and not is_tensorrt:
        return scheme
    asked = known if scheme.group_size == "auto" else (scheme.group_size,)
    sizes = [int(size) for size in asked if size in known]
    columns = sorted({columns for _, columns in rank_shapes.values()})
    ranks = deployment.tensor_parallel
    fitting = [size for size in sizes if not any(width % size for width in columns)]
    if not fitting:
        raise Refused(
            f"--for {deployment.target} with group_size {scheme.group_size}: groups of "
            f"{' or '.join(map(str, known))} that divide {', '.join(map(str, columns))} columns on each of "
            f"{ranks} ranks are needed. Choose another group size, fewer ranks or an FP8 scheme."
        )
    if deployment.target == "tensorrt-llm":
        misfits = {size: _misfit(size, rank_shapes) for size in fitting}
        fitting = [size for size in fitting if not misfits[size]]
        if not fitting:
            raise Refused(
                f"--for tensorrt-llm: {next(iter(misfits.values()))} on each of {ranks} ranks, or the loader "
                "pads the layer. Use smaller groups, fewer ranks or an FP8 scheme."
            )
    return replace(scheme, group_size=fitting[0])


def _misfit(group_size: int, rank_shapes: Shapes) -> str:
    """What is no multiple of the loader's unit, in words; q, k and v count together, as one layer."""
    unit = max(_UNIT, group_size)
    sizes: dict[str, int] = {}
    for name, (rows, columns) in rank_shapes.items():
        prefix, _, kind = name.rpartition(".")
        fused = f"{prefix}.qkv" if kind in ("q_proj", "k_proj", "v_proj") else name
        sizes[f"outputs of {fused}"] = sizes.get(f"outputs of {fused}", 0) + rows
        sizes[f"inputs of {fused}"] = columns
    wrong = next((what for what, size in sizes.items() if size % unit), None)
    return "" if wrong is None else f"the {sizes[wrong]} {wrong} must be a multiple of {unit}"
