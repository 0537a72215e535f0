"""llama.cpp's side of `compare_llama_cpp.py`: runs where llama-cpp-python is, and imports nothing of ours.

    python llama_cpp_side.py MODEL.gguf --threads 2

Takes one JSON request for each line of standard input, and answers each with one line: seconds of every step.
With --quantize TYPE it writes MODEL.TYPE.gguf beside the model by llama.cpp's own quantizer, and ends.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as ll  # type: ignore[import-not-found]
import numpy as np

MAX_SEQUENCES, MAX_TOKENS = 32, 16384


class LlamaCpp:
    """One model and one context. Sequences are numbered from 0."""

    def __init__(self, path: str, num_threads: int) -> None:
        self._model: Any = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = MAX_TOKENS, 512, 512
        params.n_threads = params.n_threads_batch = num_threads
        params.n_seq_max = MAX_SEQUENCES
        params.kv_unified = True
        self._context: Any = ll.llama_init_from_model(self._model, params)
        self._batch: Any = ll.llama_batch_init(512, 0, 1)
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)

    def step(self, tokens: list[tuple[int, int, int, bool]]) -> float:
        """tokens: (id, position, sequence, wants logits). Seconds, the greedy choice of ids included."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token_id, position, sequence, wants) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token_id, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wants
        start = time.perf_counter()
        if ll.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for i, (_, _, _, wants) in enumerate(tokens):
            if wants:
                logits = ll.llama_get_logits_ith(self._context, i)
                np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()
        return time.perf_counter() - start


def answer(model: LlamaCpp, request: dict[str, int]) -> list[float]:
    """Seconds of each step: of the prompt's, where there are no decode steps, else of those."""
    model.clear()
    num_tokens = request["num_prompt_tokens"]
    prefill = [
        model.step([(100 + t, t, sequence, t == num_tokens - 1) for t in range(num_tokens)])
        for sequence in range(request["num_sequences"])
    ]
    decode = [
        model.step(
            [(100 + s, num_tokens + s, sequence, True) for sequence in range(request["num_sequences"])]
        )
        for s in range(request["num_steps"])
    ]
    return decode or prefill


def quantize(path: Path, name: str) -> Path:
    target = path.with_suffix(f".{name}.gguf")
    params = ll.llama_model_quantize_default_params()
    params.ftype = getattr(ll, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    if ll.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError("llama_model_quantize failed")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantize", metavar="TYPE", help="Q4_0, Q8_0 ...")
    args = parser.parse_args()
    ll.llama_backend_init()
    if args.quantize:
        print(quantize(args.model, args.quantize))
        return
    model = LlamaCpp(str(args.model), args.threads)
    print(json.dumps({"version": ll.__version__, "bytes": args.model.stat().st_size}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
