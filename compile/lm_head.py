"""The head rounded to int8 at compile time, where it is dense: it is read whole for each token.

A tied embedding stays as it is; the head becomes a tensor of its own.
"""

from torch import Tensor

from bitsmith.compile.decoder_config import DecoderConfig
from bitsmith.compile.decoder_plan import Activations, HeadType
from bitsmith.core.errors import Refused
from bitsmith.quantize.qparams import Grid
from bitsmith.quantize.rtn import rtn_quantize
from bitsmith.quantize.weight import QuantizedWeight
from bitsmith.quantize.weight_source import WeightSource

_GROUP_SIZES = (64, 32, 16, 8)


def check_head(
    source: WeightSource, config: DecoderConfig, lm_head: HeadType, activations: Activations
) -> None:
    """Refuse an int8 head that would gain nothing or round twice."""
    if lm_head == "checkpoint":
        return
    if activations != "int8":
        raise Refused(
            f"--lm-head {lm_head} goes with int8 activations; this engine's are {activations}. "
            "Take --activations int8, or --lm-head checkpoint."
        )
    module = "model.embed_tokens" if config.is_tied else "lm_head"
    if not isinstance(source.linear(module), Tensor):
        raise Refused(
            f"--lm-head {lm_head}: the checkpoint's head is quantized already. Take --lm-head checkpoint."
        )


def rounded_head(weight: object) -> QuantizedWeight:
    """Round to nearest: at 8 bits and small groups there is nothing for calibration to gain."""
    assert isinstance(weight, Tensor), "check_head refuses a head that is quantized already"
    num_columns = weight.shape[1]
    group_size = next((size for size in _GROUP_SIZES if num_columns % size == 0), num_columns)
    return rtn_quantize(weight.float(), Grid(num_bits=8, group_size=group_size, symmetric=True))
