"""A double of TensorRT-LLM's LLM API, with the signatures and fields that its sources show.

It "generates" letters: greedy ones follow the alphabet from the prompt's last id, sampled ones are drawn by
the seed. Unknown arguments are errors, as in the original.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__version__ = "1.2.1"

_SAMPLING = (
    "end_id pad_id max_tokens bad bad_token_ids stop stop_token_ids include_stop_str_in_output "
    "embedding_bias logits_processor n best_of use_beam_search top_k top_p top_p_min seed temperature "
    "min_tokens repetition_penalty presence_penalty frequency_penalty length_penalty min_p logprobs "
    "prompt_logprobs ignore_eos detokenize add_special_tokens truncate_prompt_tokens skip_special_tokens"
)
_LLM = (
    "model tokenizer backend tensor_parallel_size pipeline_parallel_size kv_cache_config max_batch_size "
    "max_num_tokens max_seq_len enable_chunked_prefill speculative_config disable_overlap_scheduler"
)
NUM_LETTERS = 26
FAILING_ID = 5  # a prompt that ends in it makes the double raise
SLOW_ID = 6  # and in it: every token takes a while


class SamplingParams:
    def __init__(self, max_tokens: int = 32, **fields: Any) -> None:
        unknown = set(fields) - set(_SAMPLING.split())
        if unknown:
            raise TypeError(f"unexpected arguments {sorted(unknown)}")
        if max_tokens < 1:
            raise ValueError("max_tokens")
        self.max_tokens, self.fields = max_tokens, fields


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """Yields itself; its output grows by one token each time. Stop ids are cut off at the end."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.request_id, self.prompt, self.prompt_token_ids = 0, None, list(prompt)
        self.outputs = [CompletionOutput()]
        self.finished = False
        self._params, self._is_aborted = params, False
        self._draw = random.Random(params.fields.get("seed", 0))

    def abort(self) -> None:
        self._is_aborted = True

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0.05 if self.prompt_token_ids[-1] == SLOW_ID else 0)
        if self._is_aborted:
            self.finished, self.outputs[0].finish_reason = True, "cancelled"
            return self
        self._step(self._params.fields, self.outputs[0])
        return self

    def _step(self, fields: dict[str, Any], output: CompletionOutput) -> None:
        token_id = self._next(fields, output)
        output.token_ids.append(token_id)
        if fields.get("logprobs") is not None and output.logprobs is not None:
            rank = {token_id: Logprob(-0.5, 1)}
            others = range(1, fields["logprobs"])
            output.logprobs.append(rank | {token_id + k: Logprob(-1.0 - k, 1 + k) for k in others})
        if token_id == fields.get("end_id") and not fields.get("ignore_eos"):
            self.finished, output.finish_reason = True, "stop"
        elif token_id in fields.get("stop_token_ids", ()):
            output.token_ids.pop()
            self.finished, output.finish_reason, output.stop_reason = True, "stop", token_id
        elif len(output.token_ids) == self._params.max_tokens:
            self.finished, output.finish_reason = True, "length"

    def _next(self, fields: dict[str, Any], output: CompletionOutput) -> int:
        if fields.get("top_k") == 1:
            last = output.token_ids[-1] if output.token_ids else self.prompt_token_ids[-1]
            return int(last) + 1
        return self._draw.randrange(64, 64 + NUM_LETTERS)


class LLM:
    def __init__(self, **arguments: Any) -> None:
        unknown = set(arguments) - set(_LLM.split())
        if unknown:
            raise ValueError(f"Extra inputs are not permitted: {sorted(unknown)}")

    def generate_async(
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams | None = None,
        lora_request: None = None,
        streaming: bool = False,
    ) -> RequestOutput:
        assert sampling_params is not None and streaming
        if inputs[-1] == FAILING_ID:
            raise ValueError("a sentence that quotes the prompt")
        return RequestOutput(inputs, sampling_params)

    def shutdown(self) -> None:
        pass
