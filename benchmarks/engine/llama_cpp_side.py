"""llama.cpp's side of `compare_peers.py`: runs where llama-cpp-python is, and imports nothing of bitsmith.

    python llama_cpp_side.py MODEL.gguf --threads 2

llama.cpp itself has no loop for many requests. The one here computes prompt after prompt, then a token of
every sequence in each batch; batches of prompts and decoding sequences mixed were slower.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import llama_cpp as ll  # type: ignore[import-not-found]
import numpy as np
from peer_side import same_prompts, serve

MAX_SEQUENCES, MAX_TOKENS, BATCH_TOKENS = 32, 16384, 512


class LlamaCpp:
    """One model and one context. Sequences are numbered from 0."""

    def __init__(self, path: Path, num_threads: int, *, unified_cache: bool) -> None:
        ll.llama_backend_init()
        self._model: Any = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx = MAX_TOKENS if unified_cache else 2 * MAX_TOKENS
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = num_threads
        params.n_seq_max = MAX_SEQUENCES
        params.kv_unified = unified_cache
        self._context: Any = ll.llama_init_from_model(self._model, params)
        self._batch: Any = ll.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))
        self.version = f"llama-cpp-python {ll.__version__}"
        self.num_bytes = path.stat().st_size

    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        self._clear()
        times = []
        for sequence, prompt in enumerate(same_prompts(num_prompt_tokens, num_sequences)):
            start = time.perf_counter()
            self._run([(i, t, sequence, t == len(prompt) - 1) for t, i in enumerate(prompt)])
            times.append(time.perf_counter() - start)
        if not num_steps:
            return times
        times = []
        for step in range(num_steps):
            start = time.perf_counter()
            self._run([(100 + step, num_prompt_tokens + step, s, True) for s in range(num_sequences)])
            times.append(time.perf_counter() - start)
        return times

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        self._clear()
        start = time.perf_counter()
        texts = [list(prompt) for prompt in prompts]
        ends = [len(p) + n for p, n in zip(prompts, num_output_tokens, strict=True)]
        for s, prompt in enumerate(prompts):
            for sequence, token_id in self._run(
                [(i, t, s, t == len(prompt) - 1) for t, i in enumerate(prompt)]
            ):
                texts[sequence].append(token_id)
        while running := [s for s in range(len(texts)) if len(texts[s]) < ends[s]]:
            for sequence, token_id in self._run(
                [(texts[s][-1], len(texts[s]) - 1, s, True) for s in running]
            ):
                texts[sequence].append(token_id)
                if len(texts[sequence]) == ends[sequence]:
                    ll.llama_memory_seq_rm(ll.llama_get_memory(self._context), sequence, -1, -1)
        return time.perf_counter() - start

    def logits(self, token_ids: list[int]) -> Any:
        self._clear()
        self._decode([(i, t, 0, True) for t, i in enumerate(token_ids)])
        return np.stack([self._row(t).copy() for t in range(len(token_ids))])

    def _clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """tokens: (id, position, sequence, is its next wanted). (sequence, next id) of those."""
        self._decode(tokens)
        return [(token[2], int(self._row(i).argmax())) for i, token in enumerate(tokens) if token[3]]

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token_id, position, sequence, wants_logits) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token_id, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wants_logits
        if ll.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _row(self, index: int) -> Any:
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self._context, index), (self._vocab_size,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--unified-cache", action="store_true", help="one KV cache for all sequences")
    args = parser.parse_args()
    serve(lambda: LlamaCpp(args.model, args.threads, unified_cache=args.unified_cache))


if __name__ == "__main__":
    main()
