"""OpenVINO's side of `compare_peers.py`: runs where openvino-genai is, and imports nothing of bitsmith.

    python openvino_side.py DIRECTORY --threads 2

DIRECTORY is what `optimum-cli export openvino` wrote. Steps are those of its ContinuousBatchingPipeline.
Logits come from the same model and plug-in without that pipeline, which keeps the last row only.
"""

import argparse
import os
import time
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]
from peer_side import bytes_of, same_prompts, serve

CACHE_GIB, BATCH_TOKENS, MAX_SEQUENCES = 2, 512, 32


class OpenVino:
    def __init__(self, path: str, num_threads: int) -> None:
        self._path = path
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads}
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = BATCH_TOKENS, MAX_SEQUENCES
        self._pipeline: Any = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", self._properties)
        self._num_requests = 0
        self._logits_model: Any = None
        self.version = f"openvino-genai {genai.__version__}"
        self.num_bytes = bytes_of(path, ("openvino_model.bin",))

    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        prompts = same_prompts(num_prompt_tokens, num_sequences)
        if not num_steps:
            return [self.requests([prompt], [1]) for prompt in prompts]
        handles = [self._add(prompt, num_steps + 64) for prompt in prompts]
        num_answered = [0] * num_sequences
        while not all(num_answered):
            self._step(handles, num_answered)
        times = []
        for _ in range(num_steps):
            before, start = sum(num_answered), time.perf_counter()
            self._step(handles, num_answered)
            times.append(time.perf_counter() - start)
            assert sum(num_answered) == before + num_sequences, (before, num_answered)
        for handle in handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return times

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        start = time.perf_counter()
        handles = [self._add(p, n) for p, n in zip(prompts, num_output_tokens, strict=True)]
        num_answered = [0] * len(prompts)
        while self._pipeline.has_non_finished_requests():
            self._step(handles, num_answered)
        seconds = time.perf_counter() - start
        assert num_answered == num_output_tokens, (num_answered, num_output_tokens)
        return seconds

    def logits(self, token_ids: list[int]) -> Any:
        if self._logits_model is None:
            core = ov.Core()
            self._logits_model = core.compile_model(
                f"{self._path}/openvino_model.xml", "CPU", self._properties
            ).create_infer_request()
        request = self._logits_model
        request.reset_state()
        ids = np.array([token_ids], dtype=np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        inputs |= {"position_ids": np.arange(ids.size, dtype=np.int64)[None]}
        inputs |= {"beam_idx": np.zeros(1, dtype=np.int32)}
        names = {name for port in request.model_inputs for name in port.get_names()}
        request.infer({name: value for name, value in inputs.items() if name in names})
        return request.get_tensor("logits").data[0].copy()

    def _add(self, prompt: list[int], num_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        self._num_requests += 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(self._num_requests, ids, config)

    def _step(self, handles: list[Any], num_answered: list[int]) -> None:
        """One step of all; adds to `num_answered` how many tokens each request got."""
        self._pipeline.step()
        for index, handle in enumerate(handles):
            while handle.can_read():
                num_answered[index] += sum(len(part.generated_ids) for part in handle.read().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    serve(lambda: OpenVino(args.model, args.threads))


if __name__ == "__main__":
    main()
