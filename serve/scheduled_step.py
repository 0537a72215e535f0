"""What the scheduler hands to the model runner, what comes back, and what a step tells the outside."""

from dataclasses import dataclass

from bitsmith.core.sampling import FinishReason
from bitsmith.serve.block_pool import BlockId
from bitsmith.serve.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part of one step: tokens start : start + num_tokens, of which the last may be drafts.

    num_prompt_logits: rows of logits wanted for prompt log-probabilities, from position
    `first_prompt_logit` on. is_sampling: the step reaches the last known token, so its logits (and those of
    the drafts after it) are wanted too.
    """

    request: Request
    start: int
    num_tokens: int
    num_draft_tokens: int
    num_prompt_logits: int
    first_prompt_logit: int
    is_sampling: bool
    block_ids: tuple[BlockId, ...]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_sampling_logits(self) -> int:
        return 1 + self.num_draft_tokens if self.is_sampling else 0


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.requests)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What the model said for one scheduled request.

    token_ids: accepted drafts, then one recovered or bonus token; empty when nothing was sampled.
    logprobs: one for each of `token_ids`, or empty when not asked for. is_broken: logits were not numbers.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One RequestOutput for each scheduled request, in the step's order."""

    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """News of one request after a step. prompt_logprobs come whole, once, with the first news."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
