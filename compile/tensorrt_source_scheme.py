"""How an export's source is quantized, in TensorRT-LLM's words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceScheme:
    """quant_algo, kv_algo: TensorRT-LLM's names, None for none. is_symmetric: no zero points.

    has_pre_quant_scale: some linears multiply their inputs first. group_size: 0 where there are no groups.
    """

    quant_algo: str | None = None
    kv_algo: str | None = None
    group_size: int = 0
    is_symmetric: bool = True
    has_pre_quant_scale: bool = False
