"""When to speculate and how far: decided from what a row costs, the batch, and what was accepted so far.

Lossless in any case (rejection_sampler); this is only about speed. With R requests running and a row
costing c of an empty step, a step takes 1 + cR and yields R tokens, so a token is worth (1 + cR) / R and a
draft costs c. A draft pays when it is accepted more often than break_even = cR / (1 + cR): easily for one
request alone, hardly ever in a big batch. The j-th draft in a row counts only when all before it were right,
so it pays while p^j is above break_even, with p the request's measured acceptance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bitsmith.serve.ngram_proposer import Proposer
from bitsmith.serve.request import Request
from bitsmith.serve.scheduled_step import ScheduledStep, StepOutput
from bitsmith.serve.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """Counted since start. num_accepted_tokens: accepted drafts, recovered and bonus tokens not counted.

    Now: num_speculative_tokens, drafts for a request of ordinary acceptance at the present batch size (0:
    switched off); num_suspended, running requests that do not draft because theirs were mostly wrong;
    row_cost as measured.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_speculative_tokens: int = 0
    num_suspended: int = 0
    row_cost: float = 0.0


class Speculator(Protocol):
    """The seam at which speculation meets the engine loop."""

    @property
    def stats(self) -> SpecDecodeStats: ...

    def propose(self, running: Sequence[Request]) -> None:
        """Before a step is scheduled: write drafts into requests that decode."""
        ...

    def observe(self, step: ScheduledStep, output: StepOutput, seconds: float) -> None:
        """After a step: what became of the drafts, and how long the step took."""
        ...


class NoSpeculation:
    """Plain decoding."""

    stats = SpecDecodeStats()

    def propose(self, running: Sequence[Request]) -> None:
        pass

    def observe(self, step: ScheduledStep, output: StepOutput, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """prior_acceptance: what is assumed of a request before it has been measured, with the weight of
    `prior_weight` drafts. fade: how much an older measurement counts after each new one.
    first_pause, max_pause: steps after which a request that stopped drafting is tried again, doubling.
    """

    num_speculative_tokens: int = 5
    prior_acceptance: float = 0.6
    prior_weight: float = 3.0
    fade: float = 0.9
    first_pause: int = 32
    max_pause: int = 1024


@dataclass(slots=True)
class _Record:
    """One request's drafting. num_tried: drafts whose turn came (the accepted ones and the one rejected)."""

    num_tried: float
    num_accepted: float
    next_pause: int
    pause_left: int = 0

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_tried


class AdaptiveSpeculator:
    """Asks a proposer for as many drafts as pay."""

    def __init__(self, proposer: Proposer, limits: SpeculationLimits, cost: StepCost) -> None:
        self._proposer = proposer
        self._limits = limits
        self._cost = cost
        self._records: dict[str, _Record] = {}
        self._num_drafts = self._num_draft_tokens = self._num_accepted = self._num_ordinary = 0

    @property
    def stats(self) -> SpecDecodeStats:
        return SpecDecodeStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted,
            num_speculative_tokens=self._num_ordinary,
            num_suspended=sum(record.pause_left > 0 for record in self._records.values()),
            row_cost=self._cost.row_cost,
        )

    def num_paying(self, acceptance: float, num_running: int) -> int:
        """Draft tokens that pay for a request of this acceptance among num_running."""
        if num_running == 0 or acceptance <= 0:
            return 0
        if acceptance >= 1:
            return self._limits.num_speculative_tokens
        row_cost = self._cost.row_cost
        break_even = row_cost * num_running / (1 + row_cost * num_running)
        return min(self._limits.num_speculative_tokens, int(math.log(break_even) / math.log(acceptance)))

    def propose(self, running: Sequence[Request]) -> None:
        self._num_ordinary = self.num_paying(self._limits.prior_acceptance, len(running))
        known = {request.request_id: self._records.get(request.request_id) for request in running}
        self._records = {key: record or self._new_record() for key, record in known.items()}
        for request in running:
            if not request.is_decoding:
                continue
            num_useful = request.max_output_tokens - request.num_output_tokens - 1
            num_tokens = min(self._num_tokens(self._records[request.request_id], len(running)), num_useful)
            if num_tokens > 0:
                request.draft_token_ids = self._proposer.propose(request, num_tokens)

    def _num_tokens(self, record: _Record, num_running: int) -> int:
        """How many to draft for a request now; one that failed too often is tried again after a pause."""
        num_tokens = self.num_paying(record.acceptance, num_running)
        if num_tokens > 0 or self._num_ordinary == 0:
            record.pause_left = 0
            return num_tokens
        if record.pause_left == 0:
            record.pause_left = record.next_pause
            record.next_pause = min(2 * record.next_pause, self._limits.max_pause)
        record.pause_left -= 1
        if record.pause_left == 0:
            self._forget(record)
        return 0

    def observe(self, step: ScheduledStep, output: StepOutput, seconds: float) -> None:
        if step.requests and all(scheduled.is_sampling for scheduled in step.requests):
            self._cost.observe(step.num_tokens, seconds)
        for scheduled, said in zip(step.requests, output.outputs, strict=True):
            if scheduled.num_draft_tokens == 0 or not said.token_ids:
                continue
            num_accepted = len(said.token_ids) - 1
            self._num_drafts += 1
            self._num_draft_tokens += scheduled.num_draft_tokens
            self._num_accepted += num_accepted
            record = self._records[scheduled.request.request_id]
            num_tried = min(num_accepted + 1, scheduled.num_draft_tokens)
            record.num_tried = self._limits.fade * record.num_tried + num_tried
            record.num_accepted = self._limits.fade * record.num_accepted + num_accepted
            if record.acceptance > self._limits.prior_acceptance:
                record.next_pause = self._limits.first_pause

    def _new_record(self) -> _Record:
        record = _Record(0, 0, self._limits.first_pause)
        self._forget(record)
        return record

    def _forget(self, record: _Record) -> None:
        """What was measured of a request is given up for the assumption about all."""
        record.num_tried = self._limits.prior_weight
        record.num_accepted = self._limits.prior_weight * self._limits.prior_acceptance
