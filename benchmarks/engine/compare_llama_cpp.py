"""Our engines and llama.cpp on the same model, in turn: prefill, decode of one sequence and of many.

    python benchmarks/engine/compare_llama_cpp.py --engine runs/int4 --engine runs/bf16 \\
        --gguf MODEL.Q4_0.gguf --gguf MODEL.Q8_0.gguf --llama-python PATH [--threads 2] [--rounds 3]

llama.cpp runs in an environment of its own (`pip install llama-cpp-python --no-binary llama-cpp-python` with
CMAKE_ARGS=-DGGML_NATIVE=ON), behind a pipe: `llama_cpp_side.py`. Every case is run by every system in turn,
round after round; medians are shown, and the ratio to the first --gguf. Only one system works at a time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine, leave_threads_to_operators


@dataclass(frozen=True, slots=True)
class Case:
    """num_steps 0: the prompts' steps are timed; else so many decode steps after them."""

    name: str
    num_prompt_tokens: int
    num_sequences: int
    num_steps: int

    @property
    def num_tokens(self) -> int:
        """Of one timed step."""
        return self.num_sequences if self.num_steps else self.num_prompt_tokens


CASES = (
    Case("prefill, 256 tokens", 256, 1, 0),
    Case("prefill, 512 tokens", 512, 1, 0),
    Case("decode, 1 sequence at 256", 256, 1, 64),
    Case("decode, 8 sequences at 256", 256, 8, 24),
    Case("decode, 32 sequences at 256", 256, 32, 12),
)


class System(Protocol):
    name: str

    def run(self, case: Case) -> list[float]:
        """Seconds of each timed step."""
        ...


class OurEngine:
    def __init__(self, path: Path, num_threads: int) -> None:
        self._engine = Engine.load(path, num_threads=num_threads)
        megabytes = self._engine.weight_bytes_per_token / 1e6
        self.name = f"{path.name}: {self._engine.arithmetic}, {megabytes:.0f} MB"

    def run(self, case: Case) -> list[float]:
        blocks_each = num_blocks_for(case.num_prompt_tokens + case.num_steps)
        self._engine.allocate_kv_cache(blocks_each * case.num_sequences)
        blocks = [range(i * blocks_each, (i + 1) * blocks_each) for i in range(case.num_sequences)]
        prompt = range(100, 100 + case.num_prompt_tokens)
        prefill = [self._step([RequestStep(prompt, 0, block_ids, 1)]) for block_ids in blocks]
        decode = [
            self._step([RequestStep([100 + s], len(prompt) + s, block_ids, 1) for block_ids in blocks])
            for s in range(case.num_steps)
        ]
        return decode or prefill

    def _step(self, requests: list[RequestStep]) -> float:
        start = time.perf_counter()
        self._engine.execute(build_model_input(requests)).argmax(-1).tolist()
        return time.perf_counter() - start


class LlamaCppProcess:
    def __init__(self, python: str, gguf: Path, num_threads: int) -> None:
        script = Path(__file__).with_name("llama_cpp_side.py")
        command = [python, str(script), str(gguf), "--threads", str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        facts = json.loads(self._read())
        self.name = f"llama-cpp-python {facts['version']}: {gguf.name}, {facts['bytes'] / 1e6:.0f} MB"

    def run(self, case: Case) -> list[float]:
        assert self._process.stdin is not None
        request = {
            "num_prompt_tokens": case.num_prompt_tokens,
            "num_sequences": case.num_sequences,
            "num_steps": case.num_steps,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        seconds: list[float] = json.loads(self._read())
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp's process ended; run llama_cpp_side.py by hand to see why.")
        return line


def measure(systems: list[System], num_rounds: int) -> dict[str, list[float]]:
    """Case -> median tokens per second of each system. The first round is not counted."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(num_rounds + 1):
        for case in CASES:
            for index, system in enumerate(systems):
                steps = system.run(case)
                if number:
                    seconds.setdefault((case.name, index), []).extend(steps)
        print(f"round {number} of {num_rounds}", file=sys.stderr, flush=True)
    return {
        case.name: [
            case.num_tokens / statistics.median(seconds[case.name, index]) for index in range(len(systems))
        ]
        for case in CASES
    }


def main() -> None:
    args = _arguments()
    peers = [LlamaCppProcess(args.llama_python, path, args.threads) for path in args.gguf]
    systems: list[System] = [*peers, *(OurEngine(path, args.threads) for path in args.engine)]
    leave_threads_to_operators()
    table = measure(systems, args.rounds)
    print(f"{args.threads} threads, medians of {args.rounds} rounds, tokens/s (ratio to the first)")
    for index, system in enumerate(systems):
        print(f"\n{system.name}")
        for name, rates in table.items():
            print(f"  {name:28s} {rates[index]:8.1f}  {rates[index] / rates[0]:5.2f}")
    for peer in peers:
        peer.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", type=Path, action="append", required=True)
    parser.add_argument("--gguf", type=Path, action="append", required=True)
    parser.add_argument("--llama-python", required=True, help="a Python that has llama_cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
