"""What a run will take, before it starts: memory, disk, time. Estimates, said to be such."""

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.layerwise import TOKENS_PER_BATCH
from bitsmith.quantize.packing import num_words

_FP32_BYTES = 4
_PROBE_SIZE = 768
# Work besides the products in a forward and in the Hessians (attention, columns, descent), as a factor
# on them; measured on the demo model.
_OVERHEAD = 1.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """peak_memory_bytes: resident. disk_bytes: the most that the output's file system must hold at once."""

    output_bytes: int
    disk_bytes: int
    peak_memory_bytes: int
    seconds: float


def estimate_run(
    reader: CheckpointReader,
    scheme: QuantizationScheme,
    shapes: Mapping[str, tuple[int, int]],
    num_tokens: int,
    num_layers: int,
) -> Estimate:
    """num_tokens: calibration tokens, 0 where none are needed. shapes: (out, in) of what is quantized."""
    stored = sum(math.prod(reader.shape(n)) * reader.dtype(n).itemsize for n in reader.names)
    dense = sum(
        rows * columns * reader.dtype(f"{n}.weight").itemsize for n, (rows, columns) in shapes.items()
    )
    packed = sum(
        _packed_bytes(shape, scheme, reader.dtype(f"{n}.weight").itemsize) for n, shape in shapes.items()
    )
    output = stored - dense + packed
    hidden_size = int(_text_config(reader.config)["hidden_size"])
    hidden = num_tokens * hidden_size * _FP32_BYTES
    return Estimate(
        output_bytes=output,
        disk_bytes=output + packed + 2 * hidden,
        peak_memory_bytes=_peak_memory(reader, shapes, num_tokens, hidden, num_layers),
        seconds=_seconds(scheme, shapes, num_tokens, stored),
    )


def _peak_memory(
    reader: CheckpointReader,
    shapes: Mapping[str, tuple[int, int]],
    num_tokens: int,
    hidden_bytes: int,
    num_layers: int,
) -> int:
    """Now resident + the larger of embedding and one layer's work + activations."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    layer = sum(rows * columns for rows, columns in shapes.values()) // num_layers * _FP32_BYTES
    widest = max((columns for _, columns in shapes.values()), default=0)
    hessian = widest * widest * _FP32_BYTES
    config = _text_config(reader.config)
    embedding = int(config["vocab_size"]) * int(config["hidden_size"]) * _FP32_BYTES
    batch = min(num_tokens, TOKENS_PER_BATCH) * (widest * 4) * _FP32_BYTES
    block_inputs = num_tokens * widest * _FP32_BYTES
    return resident + max(embedding, 3 * layer + 6 * hessian) + 3 * hidden_bytes + block_inputs + batch


def _seconds(
    scheme: QuantizationScheme, shapes: Mapping[str, tuple[int, int]], num_tokens: int, stored_bytes: int
) -> float:
    copying = stored_bytes / 200e6
    if num_tokens == 0:
        return copying
    forward = sum(2.0 * rows * columns for rows, columns in shapes.values()) * num_tokens
    # q, k, v and gate, up share a Hessian: about half of the modules bring one.
    hessians = sum(1.0 * columns * columns for _, columns in shapes.values()) * num_tokens
    if scheme.method != "gptq":
        hessians = 0.0
    return copying + _OVERHEAD * (forward + hessians) / _measured_flops()


def _measured_flops() -> float:
    """Floating-point operations per second of this machine's matrix product, as busy as it is now."""
    left = torch.ones(_PROBE_SIZE, _PROBE_SIZE)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - start)
    return float(2.0 * _PROBE_SIZE**3 / best)


def _packed_bytes(shape: tuple[int, int], scheme: QuantizationScheme, scale_bytes: int) -> int:
    rows, columns = shape
    assert scheme.group_size != "auto"
    groups = 1 if scheme.group_size == "channel" else columns // scheme.group_size
    zero_points = 0 if scheme.symmetric else num_words(rows, scheme.num_bits) * groups * 4
    return rows * num_words(columns, scheme.num_bits) * 4 + rows * groups * scale_bytes + zero_points + 16


def _text_config(config: Mapping[str, object]) -> Mapping[str, int]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config  # type: ignore[return-value]
