"""Runs one scheduled step on a model: the only place where the runtime meets tensors of the engine.

Rows of logits come in the step's order; of one request first its prompt rows, then its sampling rows.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from bitsmith.core.model_input import ModelInput, ModelInputBuilder
from bitsmith.serve.rejection_sampler import RejectionSampler
from bitsmith.serve.request import Request, TokenLogprob
from bitsmith.serve.sampler import Sampler, is_plain_greedy
from bitsmith.serve.scheduled_step import RequestOutput, ScheduledRequest, ScheduledStep, StepOutput
from bitsmith.serve.token_logprobs import compute_logprobs


class StepModel(Protocol):
    """What serving needs of a compiled engine."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_tokens(self) -> int: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def arithmetic(self) -> str: ...

    def allocate_kv_cache(self, num_blocks: int) -> None: ...

    def execute(self, model_input: ModelInput) -> torch.Tensor:
        """Logits [L, vocab_size] fp32 of the rows that `logits_indices` names."""
        ...


class ModelRunner:
    """execute(ScheduledStep) -> StepOutput."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._sampler = Sampler()

    def execute(self, step: ScheduledStep) -> StepOutput:
        if not step.requests:
            return StepOutput(())
        logits = self._model.execute(build_model_input(step))
        greedy_ids, is_finite = _greedy_choices(logits, step)
        outputs: list[RequestOutput] = []
        row = 0
        for scheduled in step.requests:
            num_rows = scheduled.num_prompt_logits + scheduled.num_sampling_logits
            rows = slice(row, row + num_rows)
            row += num_rows
            if not all(is_finite[rows]):
                outputs.append(RequestOutput(is_broken=True))
                continue
            outputs.append(self._read_rows(scheduled, logits[rows], greedy_ids[rows]))
        return StepOutput(tuple(outputs))

    def _read_rows(
        self, scheduled: ScheduledRequest, logits: torch.Tensor, greedy_ids: list[int]
    ) -> RequestOutput:
        """logits: [num_prompt_logits + num_sampling_logits, vocab] of this request."""
        num_prompt = scheduled.num_prompt_logits
        token_ids: list[int] = []
        if scheduled.is_sampling:
            token_ids = self._sample(scheduled, logits[num_prompt:], greedy_ids[num_prompt:])
        request = scheduled.request
        first = scheduled.first_prompt_logit + 1
        followers = request.prompt_token_ids[first : first + num_prompt]
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.sampling.num_logprobs is not None:
            rows = logits[num_prompt : num_prompt + len(token_ids)]
            logprobs = _logprobs_of(request, rows, token_ids)
        return RequestOutput(
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=_logprobs_of(request, logits[:num_prompt], followers),
        )

    def _sample(self, scheduled: ScheduledRequest, logits: torch.Tensor, greedy_ids: list[int]) -> list[int]:
        request = scheduled.request
        drafts = request.draft_token_ids[: scheduled.num_draft_tokens]
        if is_plain_greedy(request.sampling):
            return RejectionSampler(lambda _, __, before: greedy_ids[len(before)]).verify(
                logits, request, drafts
            )
        return RejectionSampler(self._sampler.choose).verify(logits, request, drafts)


def _logprobs_of(
    request: Request, logits: torch.Tensor, token_ids: list[int] | tuple[int, ...]
) -> tuple[TokenLogprob, ...]:
    num_top = request.sampling.num_logprobs or 0
    return tuple(compute_logprobs(logits, token_ids, num_top, request.vocabulary.num_token_ids))


def _greedy_choices(logits: torch.Tensor, step: ScheduledStep) -> tuple[list[int], list[bool]]:
    """For every row the most likely known id, and whether the row holds numbers only."""
    if not len(logits):
        return [], []
    num_known = min(scheduled.request.vocabulary.num_token_ids for scheduled in step.requests)
    best = logits[:, :num_known].max(dim=-1)  # NaN counts as the greatest
    return best.indices.tolist(), torch.isfinite(best.values).tolist()


def build_model_input(step: ScheduledStep) -> ModelInput:
    builder = ModelInputBuilder()
    for scheduled in step.requests:
        token_ids = scheduled.request.tokens_with_drafts(scheduled.start, scheduled.end)
        assert len(token_ids) == scheduled.num_tokens, (len(token_ids), scheduled.num_tokens)
        builder.add(token_ids, scheduled.start, scheduled.block_ids, _logit_offsets(scheduled))
    return builder.build()


def _logit_offsets(scheduled: ScheduledRequest) -> Iterator[int]:
    """Offsets, in the request's own tokens of this step, of the rows whose logits are wanted."""
    first = scheduled.first_prompt_logit - scheduled.start
    yield from range(first, first + scheduled.num_prompt_logits)
    yield from range(scheduled.num_tokens - scheduled.num_sampling_logits, scheduled.num_tokens)
