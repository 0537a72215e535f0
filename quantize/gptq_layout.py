"""The layout of GPTQ checkpoints: integers packed along the input, and two conventions for zero points.

qweight: int32 [in * num_bits / 32, out], the first input in the lowest bits. qzeros: int32
[num_groups, out * num_bits / 32]. scales: fp16 [num_groups, out]. g_idx: int32 [in], each column's group.
Stored integers and zero points are unsigned: value + 2^(num_bits - 1). Not known here: files, settings.

Under the label `gptq` (version 1) qzeros holds zero points less one, under `gptq_v2` the zero points. The one
is subtracted from whole words, as GPTQModel does and undoes it: a zero point of 0 borrows from its neighbour.
"""

from typing import Literal

import torch
from torch import Tensor

from bitsmith.quantize.packing import WORD_BITS, pack_int32, unpack_int32
from bitsmith.quantize.weight import QuantizedWeight

GPTQ_CONFIG_NAME = "quantize_config.json"  # settings, for readers that do not look into config.json
ZeroPointLabel = Literal["gptq", "gptq_v2"]
# Widths at which version 1 means one thing. At 3 bits integers cross words: AutoGPTQ subtracts the one before
# packing, GPTQModel a constant of whole words whose ones are not where packed integers begin.
ZERO_POINTS_LESS_ONE_BITS = (2, 4, 8)


def pack_gptq(weight: QuantizedWeight, label: ZeroPointLabel) -> dict[str, Tensor]:
    """Tensors by suffix. Scales must be fp16 already; what the layout takes, the format has checked."""
    assert weight.scale.dtype == torch.float16, weight.scale.dtype
    zero_point = weight.zero_point
    if zero_point is None:
        zero_point = torch.zeros(weight.scale.shape, dtype=torch.int8)
    qzeros = pack_int32(zero_point.T.contiguous(), weight.num_bits)
    if label == "gptq":
        qzeros = qzeros - ones_word(weight.num_bits)
    return {
        "qweight": pack_int32(weight.values, weight.num_bits).T.contiguous(),
        "qzeros": qzeros,
        "scales": weight.scale.T.contiguous(),
        "g_idx": torch.arange(weight.in_features, dtype=torch.int32) // weight.group_size,
    }


def unpack_values(qweight: Tensor, num_bits: int) -> Tensor:
    """[out, in] int8."""
    return unpack_int32(qweight.T, num_bits, qweight.shape[0] * WORD_BITS // num_bits)


def unpack_zero_points(qzeros: Tensor, num_bits: int, label: ZeroPointLabel) -> Tensor:
    """[out, num_groups] int8."""
    words = qzeros + ones_word(num_bits) if label == "gptq" else qzeros
    return unpack_int32(words, num_bits, words.shape[1] * WORD_BITS // num_bits).T.contiguous()


def ones_word(num_bits: int) -> int:
    """A word in which every packed integer is 1; arithmetic on int32 tensors wraps around."""
    assert num_bits in ZERO_POINTS_LESS_ONE_BITS, num_bits
    return sum(1 << shift for shift in range(0, WORD_BITS, num_bits))
