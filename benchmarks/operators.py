"""Each operator at the demo model's shapes, next to what the machine can do at most.

    python benchmarks/operators.py [--threads 2] [--layers 30]

Decode streams the weights of all layers and the head once for each token: GB/s of weight bytes. Prefill
repeats a few layers with many tokens: GFLOP/s, counting two operations for a product. The best of several
runs is shown beside the median. With one thread the clock is that thread's processor time, which other
processes disturb less than wall time; they still take memory bandwidth and caches.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitsmith.core.progress import Reporter
from bitsmith.ops.ceilings import measure_ceilings
from bitsmith.ops.library import build_operators, load_operators
from bitsmith.ops.packing import PackedLinear, pack_quantized

# SmolLM2-135M: (out_features, in_features) of a layer, and of the head.
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE = (49152, 576)
GROUP_SIZE = 64
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64
NUM_PREFILL_LAYERS = 4
ACTIVATIONS = {0: "fp32", 2: "int8"}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. weight_bytes and num_products are of one run."""

    name: str
    run: Callable[[], object]
    weight_bytes: float
    num_products: float
    num_runs: int


def shapes(num_layers: int, *, head: bool) -> list[tuple[int, int]]:
    return [shape for _ in range(num_layers) for shape in LAYER_SHAPES] + [HEAD_SHAPE] * head


def random_packed(shape: tuple[int, int], num_bits: int) -> PackedLinear:
    values = torch.randint(-8, 8, shape, dtype=torch.int8)
    scale = (torch.rand(shape[0], shape[1] // GROUP_SIZE) * 0.01).bfloat16()
    return pack_quantized(values, scale, None, GROUP_SIZE, num_bits)


def rows(num_tokens: int) -> dict[int, Tensor]:
    return {columns: torch.randn(num_tokens, columns) for columns in (576, 1536)}


def run_quantized(weights: list[PackedLinear], x: dict[int, Tensor], activations: int) -> None:
    ops: Any = torch.ops.bitsmith
    for w in weights:
        ops.linear_quantized(
            x[w.in_features],
            w.weight,
            w.scale,
            w.zero_point,
            None,
            w.in_features,
            w.out_features,
            w.group_size,
            w.num_bits,
            activations,
        )


def run_dense(weights: list[Tensor], x: dict[int, Tensor]) -> None:
    ops: Any = torch.ops.bitsmith
    for weight in weights:
        ops.linear_dense(x[weight.shape[1]], weight, None, 0)


def linear_cases(num_tokens: int, layer_shapes: list[tuple[int, int]], num_runs: int) -> Iterator[Case]:
    """Dense and quantized products with these weights for one number of tokens."""
    parameters = sum(out * columns for out, columns in layer_shapes)
    x, products = rows(num_tokens), parameters * num_tokens
    for dtype in (torch.bfloat16, torch.float32):
        dense = [torch.randn(shape).to(dtype) for shape in layer_shapes]
        size = float(parameters * dtype.itemsize)
        name = f"T={num_tokens} dense {str(dtype)[6:]}"
        yield Case(name, lambda w=dense: run_dense(w, x), size, products, num_runs)  # type: ignore[misc]
    for num_bits in (4, 8):
        packed = [random_packed(shape, num_bits) for shape in layer_shapes]
        size = float(sum(w.weight.nbytes + w.scale.nbytes for w in packed))
        for activations, label in ACTIVATIONS.items():
            name = f"T={num_tokens} int{num_bits}, {label} activations"
            run = lambda w=packed, a=activations: run_quantized(w, x, a)  # noqa: E731
            yield Case(name, run, size, products, num_runs)


def attention_case(dtype: torch.dtype, num_tokens: int, seq_len: int) -> Case:
    ops: Any = torch.ops.bitsmith
    num_blocks = 4 * seq_len // 16
    caches = [torch.randn(num_blocks, NUM_KV_HEADS, 16, HEAD_SIZE).to(dtype) for _ in range(2)]
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_SIZE)
    table = torch.randperm(num_blocks)[None, : seq_len // 16].int()
    starts, lens = torch.tensor([0, num_tokens]).int(), torch.tensor([seq_len]).int()
    seen = num_tokens * seq_len - num_tokens * (num_tokens - 1) // 2
    size = 2.0 * NUM_KV_HEADS * HEAD_SIZE * seq_len * dtype.itemsize
    return Case(
        f"attention {str(dtype)[6:]}, {num_tokens} rows, context {seq_len}",
        lambda: ops.paged_attention(query, *caches, table, starts, lens, 0.125, 1.0, 1.0, 0, 0.0),
        size,
        2.0 * NUM_HEADS * HEAD_SIZE * seen,
        50 if num_tokens == 1 else 10,
    )


def cases(num_layers: int) -> Iterator[Case]:
    yield from linear_cases(1, shapes(num_layers, head=True), 15)
    for num_tokens in (8, 32, 256):
        yield from linear_cases(num_tokens, shapes(NUM_PREFILL_LAYERS, head=False), 7)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for num_tokens, seq_len in ((1, 256), (1, 2048), (256, 256), (256, 2048)):
            yield attention_case(dtype, num_tokens, seq_len)


def measure(case: Case, num_threads: int) -> str:
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    times = []
    for _ in range(case.num_runs):
        start = clock()
        case.run()
        times.append(clock() - start)
    best, median = min(times), sorted(times)[len(times) // 2]
    rates = f"{case.weight_bytes / best / 1e9:7.1f} GB/s {2 * case.num_products / best / 1e9:8.1f} GFLOP/s"
    return f"{case.name:44s} best {best * 1e3:8.2f} ms  median {median * 1e3:8.2f} ms {rates}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=30, help="layers streamed in decode")
    options = parser.parse_args()
    load_operators(build_operators(Reporter()))
    torch.ops.bitsmith.set_num_threads(options.threads)
    print(measure_ceilings().describe())
    for case in cases(options.layers):
        print(measure(case, options.threads), flush=True)


if __name__ == "__main__":
    main()
