"""The tensors that TensorRT-LLM's PyTorch backend reads from a unified checkpoint, for each linear.

Names are Hugging Face's with ModelOpt's suffixes. Shapes may be listed in several forms, because ModelOpt
squeezes what has one element.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bitsmith.compile.tensorrt_quantization import FP8, FP8_ROWWISE, W4A8_AWQ, W4A16, W4A16_AWQ, W8A16

NVFP4, FP8_BLOCK = "NVFP4", "FP8_BLOCK_SCALES"
UNIFIED_ALGOS = (FP8, FP8_ROWWISE, FP8_BLOCK, W8A16, W4A16_AWQ, W4A8_AWQ, NVFP4)
# Names that producers write for an algorithm above.
ALIASES: Mapping[str, str] = {"fp8_pb_wo": FP8_BLOCK}
# The backend has methods for these, but their tensors are not known well enough to check them here.
UNCHECKED_UNIFIED = (
    W4A16,
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "W4A8_MXFP4_MXFP8",
    "W4A16_MXFP4",
    "MIXED_PRECISION",
)
UNIFIED_KV_ALGOS = ("FP8", "NVFP4")
NVFP4_GROUP = 16
BLOCK = 128
# q, k, v and gate, up are fused when they are loaded; the others stand alone.
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

F8, F32 = "float8_e4m3fn", "float32"


@dataclass(frozen=True, slots=True)
class UnifiedSpec:
    """Allowed dtypes and shapes of one tensor. is_required: its absence makes loading fail."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_required: bool = True


_SCALAR = ((), (1,))


def unified_tensors(algo: str, name: str, shape: tuple[int, int], group_size: int) -> dict[str, UnifiedSpec]:
    """Suffix -> spec of one quantized linear. name: its last part, such as `o_proj`; shape: [out, in]."""
    rows, columns = shape
    if algo == FP8:
        return {
            "weight": UnifiedSpec((F8,), (shape,)),
            "weight_scale": UnifiedSpec((F32,), _SCALAR),
            "input_scale": UnifiedSpec((F32,), _SCALAR, is_required=False),
        }
    if algo == FP8_ROWWISE:
        return {
            "weight": UnifiedSpec((F8,), (shape,)),
            "weight_scale": UnifiedSpec((F32,), ((rows,), (rows, 1))),
        }
    if algo == FP8_BLOCK:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        forms: list[tuple[int, ...]] = [blocks, (blocks[0], 1, blocks[1], 1)]
        return {
            "weight": UnifiedSpec((F8,), (shape,)),
            "weight_scale": UnifiedSpec((F32,), (*forms, *(_SCALAR if blocks == (1, 1) else ()))),
        }
    if algo == W8A16:
        return {"weight": UnifiedSpec(("int8",), (shape,)), "weight_scale": UnifiedSpec((F32,), ((rows,),))}
    if algo == NVFP4:
        return {
            "weight": UnifiedSpec(("uint8",), ((rows, columns // 2),)),
            "weight_scale": UnifiedSpec((F8,), ((rows, columns // NVFP4_GROUP),)),
            "weight_scale_2": UnifiedSpec((F32,), _SCALAR),
            "input_scale": UnifiedSpec((F32,), _SCALAR),
        }
    return _awq_tensors(algo, name, shape, group_size)


def _awq_tensors(algo: str, name: str, shape: tuple[int, int], group_size: int) -> dict[str, UnifiedSpec]:
    assert algo in (W4A16_AWQ, W4A8_AWQ), algo
    rows, columns = shape
    specs = {
        "weight": UnifiedSpec(("uint8", "int8"), ((rows // 2, columns),)),
        "weight_scale": UnifiedSpec((F32, "bfloat16", "float16"), ((rows, columns // group_size),)),
    }
    if name not in FUSED:  # read without asking whether it is there
        specs["pre_quant_scale"] = UnifiedSpec(("bfloat16", "float16", F32), ((columns,),))
    if algo == W4A8_AWQ:
        specs["weight_scale_2"] = UnifiedSpec((F32,), _SCALAR)
        specs["input_scale"] = UnifiedSpec((F32,), _SCALAR)
    return specs
