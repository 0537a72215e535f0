"""Scores token sequences on a compiled engine: its own kernels, its own KV cache type."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bitsmith.compile.batch import RequestStep, build_model_input, num_blocks_for
from bitsmith.compile.engine import Engine
from bitsmith.compile.kv_cache import KVCache
from bitsmith.core.errors import Refused
from bitsmith.core.protocols import ScoringRequest

_LOGITS_BYTES = 256 << 20  # fp32 rows of the vocabulary held at once


class EngineLogitsModel:
    """LogitsModel over an engine. Keeps a KV cache of its own, apart from that of any generator."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kv_cache: KVCache | None = None
        self._max_rows = max(1, _LOGITS_BYTES // (4 * engine.vocab_size))

    @property
    def name(self) -> str:
        return f"native engine ({self._engine.arithmetic})"

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Tensor]:
        """Short requests share a step; a long one is computed in chunks, which leaves its logits the same."""
        for request in requests:
            if len(request.token_ids) > self.max_model_len:
                raise Refused(
                    f"A sequence of {len(request.token_ids)} tokens cannot be scored: the engine's "
                    f"max_model_len is {self.max_model_len}."
                )
        for wave in self._waves(requests):
            if len(wave) == 1:
                yield self._score_long(wave[0])
            else:
                yield from self._score_together(wave)

    def _waves(self, requests: Sequence[ScoringRequest]) -> Iterator[list[ScoringRequest]]:
        """Consecutive requests that fit one step together."""
        wave: list[ScoringRequest] = []
        num_tokens = num_rows = 0
        for request in requests:
            num_tokens += len(request.token_ids)
            num_rows += request.num_scored
            is_full = (
                len(wave) == self._engine.max_batch_size
                or num_tokens > self._engine.max_num_tokens
                or num_rows > self._max_rows
            )
            if wave and is_full:
                yield wave
                wave, num_tokens, num_rows = [], len(request.token_ids), request.num_scored
            wave.append(request)
        if wave:
            yield wave

    def _score_together(self, wave: Sequence[ScoringRequest]) -> Iterator[Tensor]:
        steps = []
        first_block = 0
        for request in wave:
            num_blocks = num_blocks_for(len(request.token_ids))
            blocks = range(first_block, first_block + num_blocks)
            steps.append(RequestStep(request.token_ids, 0, blocks, request.num_scored))
            first_block += num_blocks
        logits = self._execute(steps, first_block)
        yield from torch.split(logits, [request.num_scored for request in wave])

    def _score_long(self, request: ScoringRequest) -> Tensor:
        num_tokens = len(request.token_ids)
        blocks = range(num_blocks_for(num_tokens))
        first_scored = num_tokens - request.num_scored
        pieces = []
        chunk = min(self._engine.max_num_tokens, self._max_rows)
        for start in range(0, num_tokens, chunk):
            end = min(start + chunk, num_tokens)
            num_logits = max(0, end - max(start, first_scored))
            step = RequestStep(request.token_ids[start:end], start, blocks, num_logits)
            pieces.append(self._execute([step], len(blocks)))
        return torch.cat(pieces)

    def _execute(self, steps: Sequence[RequestStep], num_blocks: int) -> Tensor:
        if self._kv_cache is None or self._kv_cache.num_blocks < num_blocks:
            self._kv_cache = None
            self._kv_cache = self._engine.new_kv_cache(num_blocks)
        return self._engine.execute(build_model_input(steps), self._kv_cache)
