"""The KV-cache types of one engine side by side: bytes, decode speed at a long context, and quality.

    python benchmarks/engine/kv_cache_types.py ENGINE [--threads 2] [--context 2048] [--windows 0]

Nothing is compiled: every type runs the engine's packed weights through the module itself. Times are medians
of rounds in which the types take turns; ratios are to bf16. With --windows N, so many windows of 128 tokens
of the built-in text are decoded over each type as the compile report does it, and held against transformers.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.decoder import Decoder
from bitsmith.compile.decoder_plan import KVCacheType
from bitsmith.compile.engine import Engine, leave_threads_to_operators
from bitsmith.compile.kv_cache import KVCache
from bitsmith.compile.kv_cache_comparison import compare_kv_caches
from bitsmith.compile.reference_model import load_reference, reference_logits
from bitsmith.compile.step_runner import EagerRunner
from bitsmith.core.model_input import ModelInput
from bitsmith.core.text_source import load_text, pack_windows
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.quantize.weight_source import open_weights

TYPES: tuple[KVCacheType, ...] = ("bf16", "fp8", "int8")
SEQ_LEN = 128


def over(engine: Engine, kv_cache: KVCacheType) -> Engine:
    plan = engine.plan.with_kv_cache(kv_cache)
    return dataclasses.replace(engine, plan=plan, runner=EagerRunner(Decoder(plan, engine.weights)))


def filled_cache(engine: Engine, num_tokens: int) -> KVCache:
    """Random keys and values: how long a step takes does not depend on them."""
    cache = engine.new_kv_cache(num_blocks_for(num_tokens))
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_((torch.randn(tensor.shape) * 8).to(tensor.dtype))
    return cache


def attend_all_layers(engine: Engine, cache: KVCache, step: ModelInput) -> None:
    """The attention of one decoded token, layer after layer, without anything between."""
    ops: Any = torch.ops.bitsmith
    config = engine.plan.config
    query = torch.ones(1, config.num_heads, config.head_size)
    lookup = (step.block_table, step.query_start_loc, step.seq_lens)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        ops.paged_attention(query, keys, values, *lookup, config.softmax_scale, 0.02, 0.02, 0, 0.0)


def medians(runs: Mapping[KVCacheType, Callable[[], object]], num_rounds: int) -> dict[KVCacheType, float]:
    """Seconds; one round of all is not counted."""
    times: dict[KVCacheType, list[float]] = {name: [] for name in runs}
    for index in range(num_rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if index > 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def print_table(
    caches: Mapping[KVCacheType, KVCache], timings: Mapping[str, Mapping[KVCacheType, float]]
) -> None:
    print("| KV cache | bytes a token | ratio | " + " | ".join(f"{name} | ratio" for name in timings) + " |")
    print("|---" * (3 + 2 * len(timings)) + "|")
    for name, cache in caches.items():
        cells = [name, f"{cache.bytes_per_token:,.0f}"]
        cells.append(f"{cache.bytes_per_token / caches['bf16'].bytes_per_token:.2f}")
        for seconds in timings.values():
            cells += [f"{seconds[name] * 1e3:.2f} ms", f"{seconds[name] / seconds['bf16']:.2f}"]
        print("| " + " | ".join(cells) + " |")


def print_quality(engine: Engine, num_windows: int) -> None:
    assert engine.manifest is not None
    checkpoint = Path(engine.manifest.details["checkpoint"])
    source = open_weights(checkpoint)
    packed = pack_windows(
        load_text("builtin", "evaluation"),
        load_tokenizer(checkpoint),
        num_windows=num_windows,
        seq_len=SEQ_LEN,
        seed=0,
    )
    windows = packed.token_ids.tolist()
    model = load_reference(source)
    reference = [reference_logits(model, window, SEQ_LEN) for window in windows]
    for row in compare_kv_caches(engine, source, windows, reference):
        print(row.describe())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--windows", type=int, default=0)
    args = parser.parse_args()
    engine = Engine.load(args.engine, num_threads=args.threads)
    leave_threads_to_operators()
    engines = {name: over(engine, name) for name in TYPES}
    caches = {name: filled_cache(other, args.context) for name, other in engines.items()}
    blocks = range(num_blocks_for(args.context))
    step = build_model_input([RequestStep([1], args.context - 1, blocks, 1)])
    with torch.inference_mode():
        attention = medians(
            {n: lambda n=n: attend_all_layers(engines[n], caches[n], step) for n in TYPES},  # type: ignore[misc]
            args.rounds,
        )
        whole = medians(
            {n: lambda n=n: engines[n].execute(step, caches[n]) for n in TYPES},  # type: ignore[misc]
            args.rounds,
        )
    print(f"{args.engine}: one token at a context of {args.context}, {args.threads} threads, in turn")
    print_table(caches, {"attention of all layers": attention, "decode step": whole})
    if args.windows:
        print_quality(engine, args.windows)


if __name__ == "__main__":
    main()
