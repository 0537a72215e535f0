"""Median decode step of an engine alone and beside one busy process for each core.

    python benchmarks/busy_neighbours.py ENGINE [--threads 2] [--steps 100]

The promise is a ratio of at most 6.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine, leave_threads_to_operators

NUM_PROMPT_TOKENS = 64


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def median_step_ms(engine: Engine, num_steps: int) -> float:
    num_blocks = num_blocks_for(NUM_PROMPT_TOKENS + num_steps)
    engine.allocate_kv_cache(num_blocks)
    block_ids = range(num_blocks)
    engine.execute(build_model_input([RequestStep([1] * NUM_PROMPT_TOKENS, 0, block_ids, 1)]))
    times = []
    for position in range(NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS + num_steps):
        start = time.perf_counter()
        engine.execute(build_model_input([RequestStep([1], position, block_ids, 1)]))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    engine = Engine.load(options.engine, trust=True, num_threads=options.threads)
    leave_threads_to_operators()
    median_step_ms(engine, 10)
    alone = median_step_ms(engine, options.steps)
    num_neighbours = len(os.sched_getaffinity(0))
    with busy_processes(num_neighbours):
        beside = median_step_ms(engine, options.steps)
    print(
        f"median decode step, {options.threads} threads: alone {alone:.1f} ms, beside {num_neighbours} busy "
        f"processes {beside:.1f} ms, ratio {beside / alone:.2f}"
    )


if __name__ == "__main__":
    main()
