"""vLLM's side of `compare_peers.py`: its CPU build, the engine in this process; imports nothing of bitsmith.

python vllm_side.py DIRECTORY --threads 2
"""

import argparse
import itertools
import os
import time
from typing import Any

# Read by vLLM when it is imported; it has no other way to set them.
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"}

import vllm  # type: ignore[import-not-found]
from peer_side import CannotRun, bytes_of, same_prompts, serve


class Vllm:
    def __init__(self, path: str) -> None:
        model = vllm.LLM(
            path, dtype="bfloat16", max_model_len=1024, max_num_seqs=32, enable_prefix_caching=False
        )
        self._engine: Any = model.llm_engine
        self._numbers = itertools.count()
        self.version = f"vllm {vllm.__version__}"
        self.num_bytes = bytes_of(path, (".safetensors",))

    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        prompts = same_prompts(num_prompt_tokens, num_sequences)
        if not num_steps:
            return [self.requests([prompt], [1]) for prompt in prompts]
        names = [self._add(prompt, num_steps + 64) for prompt in prompts]
        answered: set[str] = set()
        while len(answered) < num_sequences:
            answered |= {output.request_id for output in self._engine.step()}
        times = []
        for _ in range(num_steps):
            start = time.perf_counter()
            outputs = self._engine.step()
            times.append(time.perf_counter() - start)
            assert len(outputs) == num_sequences, len(outputs)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return times

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        start = time.perf_counter()
        for prompt, num_tokens in zip(prompts, num_output_tokens, strict=True):
            self._add(prompt, num_tokens)
        num_answered = 0
        while self._engine.has_unfinished_requests():
            finished = [output for output in self._engine.step() if output.finished]
            num_answered += sum(len(output.outputs[0].token_ids) for output in finished)
        seconds = time.perf_counter() - start
        assert num_answered == sum(num_output_tokens), (num_answered, sum(num_output_tokens))
        return seconds

    def logits(self, token_ids: list[int]) -> Any:
        raise CannotRun("it gives no logits of a whole prompt")

    def _add(self, prompt: list[int], num_tokens: int) -> str:
        name = str(next(self._numbers))
        params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{args.threads - 1}"
    serve(lambda: Vllm(args.model))


if __name__ == "__main__":
    main()
