"""A request and its progress. All state of a generation lives here; it knows nothing of tensors or blocks."""

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

from bitsmith.core.sampling import FinishReason, SamplingParams


class RequestStatus(IntEnum):
    """Ordered so that `is_finished` is one comparison."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}

_BEFORE_RUNNING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the tokenizer says of ids: those it knows, and those that end a text.

    num_token_ids: ids at or above it have no text (rows that only pad the model's vocabulary) and are never
    sampled. end_token_ids: union of the generation config's, the model config's and the tokenizer's.
    """

    num_token_ids: int
    end_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log log-softmax of raw logits for one token, and for the most likely ones there.

    top: (token id, log-probability), most likely first. The same float stands in both places for one token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to continue.

    num_computed_tokens: tokens whose K and V are in the cache; it catches up with `num_tokens_with_drafts`.
    max_output_tokens: the caller's limit, already cut to what the context holds; 0 scores the prompt only.
    prompt_logprobs: of prompt tokens 1, 2, ...; filled chunk by chunk, kept through a preemption.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    vocabulary: Vocabulary
    max_output_tokens: int
    seed: int
    wants_prompt_logprobs: bool = False
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    draft_token_ids: tuple[int, ...] = ()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    output_counts: Counter[int] = field(default_factory=Counter)
    _token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, f"request {self.request_id} has an empty prompt"
        self._token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens_with_drafts(self) -> int:
        return len(self._token_ids) + len(self.draft_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, without drafts; to be read only."""
        return self._token_ids

    @property
    def output_token_ids(self) -> list[int]:
        return self._token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Everything but the newest token is computed: the next step yields a new token."""
        return self.num_computed_tokens == self.num_tokens - 1

    @property
    def next_prompt_logprob_position(self) -> int | None:
        """First position whose logits are still wanted for a prompt log-probability, or None."""
        num_done = len(self.prompt_logprobs)
        if self.wants_prompt_logprobs and num_done < self.num_prompt_tokens - 1:
            return num_done
        return None

    def tokens_with_drafts(self, start: int, end: int) -> list[int]:
        """Token ids at positions start : end, drafts included."""
        tokens = self._token_ids[start:end]
        if end > self.num_tokens:
            tokens += self.draft_token_ids[max(0, start - self.num_tokens) : end - self.num_tokens]
        return tokens

    def append_output(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self.output_counts[token_id] += 1

    def start_running(self) -> None:
        assert self.status in _BEFORE_RUNNING, f"{self.request_id}: {self.status.name} cannot start running"
        self.status = RequestStatus.RUNNING

    def preempt(self) -> None:
        """Back to nothing computed; prompt and output so far become what has to be computed again."""
        assert self.status is RequestStatus.RUNNING, (self.request_id, self.status)
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.draft_token_ids = ()

    def finish(self, status: RequestStatus) -> None:
        assert status.is_finished and not self.status.is_finished, (self.request_id, self.status, status)
        self.status = status
        self.draft_token_ids = ()
