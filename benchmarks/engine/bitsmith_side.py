"""Our side of `compare_peers.py`: a compiled engine behind the pipe that the peers have.

    python bitsmith_side.py ENGINE --threads 2

Many requests go through the loop that `bitsmith serve` runs, without prefix caching and speculation.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from peer_side import same_prompts, serve

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine, leave_threads_to_operators
from bitsmith.compile.engine_logits import EngineLogitsModel
from bitsmith.core.protocols import ScoringRequest
from bitsmith.core.sampling import SamplingParams
from bitsmith.core.versions import installed_version
from bitsmith.serve.engine_setup import build_engine_loop, resolve_limits
from bitsmith.serve.request import Request, Vocabulary
from bitsmith.serve.serve_settings import RuntimeSettings


class CompiledEngine:
    def __init__(self, path: Path, num_threads: int) -> None:
        self._engine = Engine.load(path, num_threads=num_threads)
        leave_threads_to_operators()
        self.version = f"bitsmith {installed_version('bitsmith')} ({self._engine.arithmetic})"
        self.num_bytes = self._engine.weight_bytes_per_token

    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        blocks_each = num_blocks_for(num_prompt_tokens + num_steps)
        self._engine.allocate_kv_cache(blocks_each * num_sequences)
        blocks = [range(i * blocks_each, (i + 1) * blocks_each) for i in range(num_sequences)]
        prompts = same_prompts(num_prompt_tokens, num_sequences)
        prefill = [
            self._step([RequestStep(prompt, 0, block_ids, 1)])
            for prompt, block_ids in zip(prompts, blocks, strict=True)
        ]
        decode = [
            self._step([RequestStep([100 + s], num_prompt_tokens + s, ids, 1) for ids in blocks])
            for s in range(num_steps)
        ]
        return decode or prefill

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        settings = RuntimeSettings(prefix_caching=False)
        loop = build_engine_loop(self._engine, settings, resolve_limits(self._engine, settings))
        vocabulary = Vocabulary(self._engine.vocab_size, frozenset())
        start = time.perf_counter()
        for index, (prompt, num_tokens) in enumerate(zip(prompts, num_output_tokens, strict=True)):
            sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            loop.add(Request(str(index), tuple(prompt), sampling, vocabulary, num_tokens, seed=0))
        num_answered = 0
        while loop.has_unfinished:
            num_answered += sum(len(progress.token_ids) for progress in loop.step())
        assert num_answered == sum(num_output_tokens), (num_answered, sum(num_output_tokens))
        return time.perf_counter() - start

    def logits(self, token_ids: list[int]) -> Any:
        model = EngineLogitsModel(self._engine)
        return next(model.score([ScoringRequest(tuple(token_ids), len(token_ids))])).numpy()

    def _step(self, requests: list[RequestStep]) -> float:
        start = time.perf_counter()
        self._engine.execute(build_model_input(requests)).argmax(-1).tolist()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    serve(lambda: CompiledEngine(args.model, args.threads))


if __name__ == "__main__":
    main()
