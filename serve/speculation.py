"""When to speculate and how far: decided from the batch and from what was accepted so far.

Lossless in any case (rejection_sampler); this is only about speed. Two rules:
- rows: drafts of all requests together, plus one row each, stay below `max_rows`, beyond which a step is no
  longer paced by reading the weights and drafts cost more than they save;
- acceptance: a request whose drafts are mostly rejected stops drafting for a while, longer each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bitsmith.serve.ngram_proposer import Proposer
from bitsmith.serve.request import Request
from bitsmith.serve.scheduled_step import ScheduledStep, StepOutput


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """Counted since start. num_accepted_tokens: accepted drafts, recovered and bonus tokens not counted.

    num_suspended: running requests whose drafting is switched off at the moment.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_speculative_tokens: int = 0
    num_suspended: int = 0


class Speculator(Protocol):
    """The seam at which speculation meets the engine loop."""

    @property
    def stats(self) -> SpecDecodeStats: ...

    def propose(self, running: Sequence[Request]) -> None:
        """Before a step is scheduled: write drafts into requests that decode."""
        ...

    def observe(self, step: ScheduledStep, output: StepOutput) -> None:
        """After a step: what became of the drafts."""
        ...


class NoSpeculation:
    """Plain decoding."""

    stats = SpecDecodeStats()

    def propose(self, running: Sequence[Request]) -> None:
        pass

    def observe(self, step: ScheduledStep, output: StepOutput) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """min_acceptance_rate: below it, measured over `window` draft tokens, a request is suspended for
    `first_pause` of its steps, doubled each time up to `max_pause`."""

    num_speculative_tokens: int = 5
    max_rows: int = 16
    min_acceptance_rate: float = 0.3
    window: int = 20
    first_pause: int = 32
    max_pause: int = 1024


@dataclass(slots=True)
class _Record:
    """One request's drafting: counts in the current window, steps left of a pause, length of the next."""

    num_drafted: int = 0
    num_accepted: int = 0
    pause_left: int = 0
    next_pause: int = 0


class AdaptiveSpeculator:
    """Asks a proposer for as many drafts as the two rules allow."""

    def __init__(self, proposer: Proposer, limits: SpeculationLimits) -> None:
        self._proposer = proposer
        self._limits = limits
        self._records: dict[str, _Record] = {}
        self._num_drafts = self._num_draft_tokens = self._num_accepted = self._num_allowed = 0

    @property
    def stats(self) -> SpecDecodeStats:
        return SpecDecodeStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted,
            num_speculative_tokens=self._num_allowed,
            num_suspended=sum(record.pause_left > 0 for record in self._records.values()),
        )

    def num_allowed(self, num_running: int) -> int:
        """Draft tokens for each request by the rule of rows."""
        if num_running == 0:
            return 0
        return max(0, min(self._limits.num_speculative_tokens, self._limits.max_rows // num_running - 1))

    def propose(self, running: Sequence[Request]) -> None:
        self._num_allowed = self.num_allowed(len(running))
        fresh = {request.request_id: self._records.get(request.request_id) for request in running}
        self._records = {key: record or self._new_record() for key, record in fresh.items()}
        if self._num_allowed == 0:
            return
        for request in running:
            record = self._records[request.request_id]
            if not request.is_decoding:
                continue
            if record.pause_left > 0:
                record.pause_left -= 1
                continue
            num_useful = request.max_output_tokens - request.num_output_tokens - 1
            num_tokens = min(self._num_allowed, num_useful)
            if num_tokens > 0:
                request.draft_token_ids = self._proposer.propose(request, num_tokens)

    def observe(self, step: ScheduledStep, output: StepOutput) -> None:
        for scheduled, said in zip(step.requests, output.outputs, strict=True):
            if scheduled.num_draft_tokens == 0 or not said.token_ids:
                continue
            num_accepted = len(said.token_ids) - 1
            self._num_drafts += 1
            self._num_draft_tokens += scheduled.num_draft_tokens
            self._num_accepted += num_accepted
            record = self._records[scheduled.request.request_id]
            record.num_drafted += scheduled.num_draft_tokens
            record.num_accepted += num_accepted
            self._judge(record)

    def _new_record(self) -> _Record:
        return _Record(next_pause=self._limits.first_pause)

    def _judge(self, record: _Record) -> None:
        if record.num_drafted < self._limits.window:
            return
        if record.num_accepted < self._limits.min_acceptance_rate * record.num_drafted:
            record.pause_left = record.next_pause
            record.next_pause = min(2 * record.next_pause, self._limits.max_pause)
        else:
            record.next_pause = self._limits.first_pause
        record.num_drafted = record.num_accepted = 0
