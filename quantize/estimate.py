"""What a run will take, before it starts: memory, disk, time. Estimates, said to be such."""

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.scheme import QuantizationScheme
from bitsmith.quantize.budget import BudgetPlan
from bitsmith.quantize.input_range import SAMPLE_TOKENS
from bitsmith.quantize.layer_batches import TOKENS_PER_BATCH
from bitsmith.quantize.packing import num_words

_FP32_BYTES = 4
_PROBE_SIZE = 768
# What each part costs in floating-point operations of a plain matrix product, and what rounding costs for
# each weight: fitted to a profile of the demo model.
_FORWARD_FACTOR = 2.0  # attention and pointwise work beside the products
_HESSIAN_FACTOR = 1.3
_SOLVER_FACTOR = 36.0  # GPTQ, two sweeps of descent and the error's measurement, per out * in^2
_SCALE_SEARCH_FACTOR = 26.0  # thirteen candidates, one product each, per out * in^2
_TRIAL_FACTOR = 10.0  # one rounding on trial, per out * in^2
_SECONDS_PER_WEIGHT = 1.5e-7  # scale search, packing, writing
_COPY_BYTES_PER_S = 200e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """peak_memory_bytes: resident. disk_bytes: the most that the output's file system must hold at once.

    seconds: None where nothing is known of the time, as of another tool's.
    """

    output_bytes: int
    disk_bytes: int
    peak_memory_bytes: int
    seconds: float | None


def estimate_run(
    reader: CheckpointReader,
    scheme: QuantizationScheme,
    shapes: Mapping[str, tuple[int, int]],
    num_tokens: int,
    num_layers: int,
    tokens_per_step: int,
) -> Estimate:
    """num_tokens: calibration tokens, 0 where none are needed. shapes: (out, in) of what is quantized.
    tokens_per_step: of refinement, 0 for none."""
    stored = sum(math.prod(reader.shape(n)) * reader.dtype(n).itemsize for n in reader.names)
    dense = sum(
        rows * columns * reader.dtype(f"{n}.weight").itemsize for n, (rows, columns) in shapes.items()
    )
    packed = sum(
        _packed_bytes(shape, scheme, reader.dtype(f"{n}.weight").itemsize) for n, shape in shapes.items()
    )
    kv_scales = 0 if scheme.kv_cache == "none" else 2 * _FP32_BYTES * num_layers
    output = stored - dense + packed + kv_scales
    hidden_size = int(_text_config(reader.config)["hidden_size"])
    # Refinement keeps the unquantized model's activations beside the quantized one's.
    hidden = num_tokens * hidden_size * _FP32_BYTES * (2 if tokens_per_step else 1)
    return Estimate(
        output_bytes=output,
        disk_bytes=output + packed + 2 * hidden,
        peak_memory_bytes=_peak_memory(reader, shapes, num_tokens, hidden, num_layers),
        seconds=_seconds(reader, scheme, shapes, (num_tokens, tokens_per_step)),
    )


def with_budget(estimate: Estimate, budget: BudgetPlan, shapes: Mapping[str, tuple[int, int]]) -> Estimate:
    """Of a run that first measures what bits cost. Its output is the budget's, or less."""
    output = budget.other_bytes + min(budget.limit_bytes, budget.largest_bytes)
    grown = max(0, output - estimate.output_bytes)
    assert estimate.seconds is not None
    trials = _TRIAL_FACTOR * len(budget.choices) * sum(rows * columns**2 for rows, columns in shapes.values())
    return Estimate(
        output_bytes=output,
        disk_bytes=estimate.disk_bytes + 2 * grown,
        peak_memory_bytes=estimate.peak_memory_bytes,
        # The unquantized model runs, and gives Hessians, as it does once more when it is quantized.
        seconds=2 * estimate.seconds + trials / _measured_flops(),
    )


def _peak_memory(
    reader: CheckpointReader,
    shapes: Mapping[str, tuple[int, int]],
    num_tokens: int,
    hidden_bytes: int,
    num_layers: int,
) -> int:
    """Now resident + the mapped checkpoint + the larger of embedding and a layer's work + activations."""
    mapped = sum(math.prod(reader.shape(n)) * reader.dtype(n).itemsize for n in reader.names)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + mapped
    layer = sum(rows * columns for rows, columns in shapes.values()) // num_layers * _FP32_BYTES
    widest = max((columns for _, columns in shapes.values()), default=0)
    hessian = widest * widest * _FP32_BYTES
    config = _text_config(reader.config)
    embedding = int(config["vocab_size"]) * int(config["hidden_size"]) * _FP32_BYTES
    batch = min(num_tokens, TOKENS_PER_BATCH) * (widest * 4) * _FP32_BYTES
    block_inputs = num_tokens * widest * _FP32_BYTES
    return resident + max(embedding, 3 * layer + 6 * hessian) + 3 * hidden_bytes + block_inputs + batch


def _seconds(
    reader: CheckpointReader,
    scheme: QuantizationScheme,
    shapes: Mapping[str, tuple[int, int]],
    tokens: tuple[int, int],
) -> float:
    """tokens: of calibration, and of one step of refinement."""
    num_tokens, tokens_per_step = tokens
    stored = sum(math.prod(reader.shape(n)) * reader.dtype(n).itemsize for n in reader.names)
    num_weights = sum(rows * columns for rows, columns in shapes.values())
    plain = stored / _COPY_BYTES_PER_S + num_weights * _SECONDS_PER_WEIGHT
    in_layers = [n for n in reader.names if ".layers." in n and len(reader.shape(n)) == 2]
    forward = _FORWARD_FACTOR * 2.0 * sum(math.prod(reader.shape(n)) for n in in_layers)
    work = forward * num_tokens
    if tokens_per_step:
        # The unquantized model runs too; a step is a forward and a backward of about two.
        work += forward * (num_tokens + 3 * scheme.refine_steps * tokens_per_step)
    # q, k, v and gate, up share a Hessian: about half of the modules bring one.
    hessians = _HESSIAN_FACTOR * num_tokens * sum(columns * columns for _, columns in shapes.values())
    cubes = sum(rows * columns * columns for rows, columns in shapes.values())
    if scheme.uses_gptq:
        work += hessians + _SOLVER_FACTOR * cubes
    if scheme.moves_scales:
        # Every stage is seen twice: before scales are folded, and when it is quantized.
        work += forward * num_tokens
        if scheme.rounds_to_integers:
            work += _SCALE_SEARCH_FACTOR * cubes + hessians * (1 if scheme.uses_gptq else 2)
        else:
            work += _SCALE_SEARCH_FACTOR * SAMPLE_TOKENS * num_weights
    return plain + (work / _measured_flops() if work else 0.0)


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
    if scheme.method == "smoothquant":
        return (
            rows * columns + rows * scale_bytes + (_FP32_BYTES if scheme.activation_scale == "tensor" else 0)
        )
    if scheme.method == "fp8":
        return rows * columns + (rows if scheme.activation_scale == "token" else 2) * _FP32_BYTES
    groups = columns // scheme.group_size if isinstance(scheme.group_size, int) else 1
    zero_points = 0 if scheme.symmetric else num_words(rows, scheme.num_bits) * groups * 4
    return rows * num_words(columns, scheme.num_bits) * 4 + rows * groups * scale_bytes + zero_points + 16


def _text_config(config: Mapping[str, object]) -> Mapping[str, int]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config  # type: ignore[return-value]
