"""The layout of AWQ checkpoints (`gemm`): integers packed along the output, in an order of their own.

qweight: int32 [in, out * 4 / 32]. qzeros: int32 [num_groups, out * 4 / 32]. scales: fp16 [num_groups, out].
Stored integers and zero points are unsigned: value + 8. Not known here: files, settings.
"""

import torch
from torch import Tensor

from bitsmith.quantize.packing import WORD_BITS, pack_int32, unpack_int32
from bitsmith.quantize.weight import QuantizedWeight

AWQ_BITS = 4
# Output that position i of a word holds, the lowest bits first: kernels take even and odd outputs apart.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_POSITION = tuple(_ORDER.index(output) for output in range(len(_ORDER)))


def pack_awq(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Tensors by suffix. Scales must be fp16 already; what the layout takes, the format has checked."""
    assert weight.num_bits == AWQ_BITS and weight.scale.dtype == torch.float16, weight.scale.dtype
    zero_point = weight.zero_point
    if zero_point is None:
        zero_point = torch.zeros(weight.scale.shape, dtype=torch.int8)
    return {
        "qweight": pack_int32(_permuted(weight.values.T, _ORDER), AWQ_BITS),
        "qzeros": pack_int32(_permuted(zero_point.T, _ORDER), AWQ_BITS),
        "scales": weight.scale.T.contiguous(),
    }


def unpack_awq(words: Tensor) -> Tensor:
    """[rows, out / 8] int32 -> [out, rows] int8; rows: of inputs, or of groups."""
    values = unpack_int32(words, AWQ_BITS, words.shape[1] * WORD_BITS // AWQ_BITS)
    return _permuted(values, _POSITION).T.contiguous()


def _permuted(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """Columns of [rows, out], eight at a time, in another order."""
    num_rows, num_columns = values.shape
    return values.reshape(num_rows, -1, len(order))[:, :, list(order)].reshape(num_rows, num_columns)
