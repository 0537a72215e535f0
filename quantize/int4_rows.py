"""Four-bit integers two to a byte, as ModelOpt and TensorRT-LLM's AWQ loader have them, and back.

Two adjacent OUTPUT rows share a byte: the low nibble is row 2j, the high nibble row 2j + 1, each a signed
two's-complement number.
"""

import torch
from torch import Tensor

INT4_MIN, INT4_MAX = -8, 7


def pack_rows(values: Tensor) -> Tensor:
    """[out, in] int8 in [-8, 7] -> [out / 2, in] int8.

    >>> pack_rows(torch.tensor([[1], [-1]], dtype=torch.int8)).view(torch.uint8).tolist()
    [[241]]
    """
    assert values.dtype == torch.int8 and values.shape[0] % 2 == 0, (values.dtype, values.shape)
    nibbles = values.view(torch.uint8) & 0xF
    return (nibbles[0::2] | nibbles[1::2] << 4).view(torch.int8)


def unpack_rows(packed: Tensor) -> Tensor:
    """Inverse of `pack_rows`: [out / 2, in] int8 or uint8 -> [out, in] int8."""
    stored = packed.view(torch.uint8)
    # [out / 2, 2, in]: low nibble first; the subtraction extends the sign of four bits to eight
    nibbles = torch.stack([stored & 0xF, stored >> 4], dim=1).flatten(0, 1).view(torch.int8)
    return ((nibbles ^ 8) - 8).contiguous()
