"""Generation in this process, without HTTP: the server's own loop, for evaluation and the terminal."""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bitsmith.core.errors import Refused
from bitsmith.core.protocols import GeneratedText
from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.engine_setup import build_engine_loop, resolve_limits
from bitsmith.serve.model_runner import StepModel
from bitsmith.serve.request import Request
from bitsmith.serve.serve_settings import RuntimeSettings
from bitsmith.serve.text_collector import TextCollector, TextDelta
from bitsmith.serve.token_bytes import TokenBytes, load_vocabulary

SEED_BITS = 63


class EngineGenerator:
    """core's TextGenerator over a compiled engine; many prompts run together in one batch."""

    def __init__(
        self,
        model: StepModel,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_path: Path,
        settings: RuntimeSettings = RuntimeSettings(),  # noqa: B008 - frozen, so one object may be shared
    ) -> None:
        self.limits = resolve_limits(model, settings)
        self._loop = build_engine_loop(model, settings, self.limits)
        self._token_bytes = TokenBytes(tokenizer)
        self._vocabulary = load_vocabulary(tokenizer, self._token_bytes, tokenizer_path)
        self._num_requests = 0

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[GeneratedText]:
        """Results in the order of the prompts; an output longer than the context holds ends with "length".

        Raises Refused when a prompt leaves no room for one token.
        """
        texts: dict[int, list[str]] = {index: [] for index in range(len(prompts))}
        tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        finished: dict[int, GeneratedText] = {}
        next_index = 0
        for index, delta in self._run(prompts, params):
            texts[index].append(delta.text)
            tokens[index] += delta.token_ids
            if delta.finish_reason is not None:
                finished[index] = GeneratedText(
                    "".join(texts.pop(index)), tuple(tokens.pop(index)), delta.finish_reason
                )
            while next_index in finished:
                yield finished.pop(next_index)
                next_index += 1

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[TextDelta]:
        """One generation, piece by piece."""
        for _, delta in self._run([prompt], [params]):
            yield delta

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[tuple[int, TextDelta]]:
        """(index of the prompt, what is new), until all are finished. Left early, the rest is aborted."""
        requests = [self._make_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        collectors = {
            request.request_id: (
                index,
                TextCollector(self._token_bytes, request.prompt_token_ids, request.sampling),
            )
            for index, request in enumerate(requests)
        }
        for request in requests:
            self._loop.add(request)
        try:
            while collectors:
                for progress in self._loop.step():
                    if progress.request_id not in collectors:
                        continue
                    index, collector = collectors[progress.request_id]
                    delta = collector.feed(progress)
                    if delta.finish_reason is not None:
                        del collectors[progress.request_id]
                        self._loop.abort(progress.request_id)
                    yield index, delta
        finally:
            for request_id in collectors:
                self._loop.abort(request_id)
        self._loop.check_integrity()

    def _make_request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise Refused(
                f"A prompt has {len(prompt)} tokens; it must have at least 1 and, with one token of output, "
                f"fit the context of {self.max_model_len}."
            )
        if params.max_tokens < 1:
            raise Refused(f"max_tokens is {params.max_tokens}; it must be at least 1.")
        self._num_requests += 1
        return Request(
            request_id=str(self._num_requests),
            prompt_token_ids=tuple(prompt),
            sampling=params,
            vocabulary=self._vocabulary,
            max_output_tokens=min(params.max_tokens, room),
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        )
