"""transformers' side of `compare_peers.py`: eager, with its dynamic KV cache; imports nothing of bitsmith.

python transformers_side.py DIRECTORY --threads 2 --dtype bfloat16
"""

import argparse
import os
import time
from typing import Any

import torch
import transformers
from peer_side import CannotRun, bytes_of, same_prompts, serve
from transformers import AutoModelForCausalLM


class Transformers:
    def __init__(self, path: str, num_threads: int, dtype: str) -> None:
        torch.set_num_threads(num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.num_bytes = bytes_of(path, (".safetensors",)) * (2 if dtype == "float32" else 1)

    @torch.inference_mode()
    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        token_ids = torch.tensor(same_prompts(num_prompt_tokens, num_sequences))
        cache, times = None, []
        for _ in range(num_steps + 1):
            start = time.perf_counter()
            output = self._model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token_ids, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
            times.append(time.perf_counter() - start)
        return times[1:] if num_steps else times

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        raise CannotRun("its eager mode has no continuous batching")

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Any:
        return self._model(torch.tensor([token_ids])).logits[0].float().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    args = parser.parse_args()
    serve(lambda: Transformers(args.model, args.threads, args.dtype))


if __name__ == "__main__":
    main()
