"""ONNX Runtime GenAI's side of `compare_peers.py`: imports nothing of bitsmith.

    python onnxruntime_side.py DIRECTORY --threads 2

DIRECTORY is what `python -m onnxruntime_genai.models.builder` wrote.
"""

import argparse
import json
import os
import time
from typing import Any

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]
from peer_side import CannotRun, bytes_of, same_prompts, serve


class OnnxRuntime:
    def __init__(self, path: str, num_threads: int) -> None:
        config = og.Config(path)
        options = {"session_options": {"intra_op_num_threads": num_threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model: Any = og.Model(config)
        self.version = f"onnxruntime-genai {og.__version__}"
        self.num_bytes = bytes_of(path, (".onnx", ".data"))

    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        prompts = same_prompts(num_prompt_tokens, num_sequences)
        generator = self._generator(num_sequences, num_prompt_tokens + num_steps + 1)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        times = []
        for _ in range(num_steps + 1):  # the first one only chooses: the prompt's logits are there
            generator.generate_next_token()
            generator.get_next_tokens()
            end = time.perf_counter()
            times.append(end - start)
            start = end
        return times[1:] if num_steps else times

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        raise CannotRun("no continuous batching on processors")

    def logits(self, token_ids: list[int]) -> Any:
        generator = self._generator(1, len(token_ids) + 1)
        generator.append_tokens(np.array([token_ids], dtype=np.int32))
        return generator.get_output("logits")[0]

    def _generator(self, num_sequences: int, length: int) -> Any:
        params = og.GeneratorParams(self._model)
        params.set_search_options(
            do_sample=False, batch_size=num_sequences, min_length=length, max_length=length
        )
        return og.Generator(self._model, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    serve(lambda: OnnxRuntime(args.model, args.threads))


if __name__ == "__main__":
    main()
