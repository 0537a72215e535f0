"""Which tokens of which requests go into the next step.

There is no prefill and no decode phase: every request has `num_computed_tokens`, which catches up with its
tokens, drafts included. Chunked prefill, prefix hits, recomputation after a preemption and verification of
drafts are all that one subtraction. The scheduler knows no tensors, no text and no sampling.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from bitsmith.serve.kv_cache_manager import KVCacheManager
from bitsmith.serve.request import Request, RequestStatus
from bitsmith.serve.scheduled_step import (
    RequestOutput,
    RequestProgress,
    ScheduledRequest,
    ScheduledStep,
    StepOutput,
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_batched_tokens: tokens of one step, all requests together. max_num_prompt_logits: rows of
    logits that prompt log-probabilities may ask for in one step (each is a row of the whole vocabulary)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prompt_logits: int


@dataclass(slots=True)
class _Budget:
    num_tokens: int
    num_prompt_logits: int


class Scheduler:
    """First come, first served. `running` is in order of arrival in it; a preempted request waits first."""

    def __init__(self, limits: SchedulerLimits, kv_cache: KVCacheManager) -> None:
        assert limits.max_num_seqs <= limits.max_num_batched_tokens, limits
        self._limits = limits
        self._kv_cache = kv_cache
        self._requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_free_kv_blocks(self) -> int:
        return self._kv_cache.num_free_blocks

    def add(self, request: Request) -> None:
        """Queue a request; the caller has made sure that it fits the cache when alone."""
        num_needed = request.num_prompt_tokens + max(request.max_output_tokens - 1, 0)
        assert num_needed <= self._kv_cache.max_tokens_per_request, (request.request_id, num_needed)
        assert request.request_id not in self._requests, f"{request.request_id} is queued twice"
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Drop a request wherever it is; one that has ended already (or never was) is no error."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> ScheduledStep:
        budget = _Budget(self._limits.max_num_batched_tokens, self._limits.max_num_prompt_logits)
        num_preemptions_before = self.num_preemptions
        scheduled = self._schedule_running(budget)
        if self.num_preemptions == num_preemptions_before:
            scheduled += self._schedule_waiting(budget)
        assert scheduled or not self.has_unfinished, "requests wait, yet none can be scheduled"
        return ScheduledStep(tuple(scheduled))

    def _schedule_running(self, budget: _Budget) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        index = 0
        while index < len(self.running) and budget.num_tokens > 0:
            request = self.running[index]
            if self._num_new_tokens(request, budget) > 0:
                if not self._make_room(request, budget):
                    break
                scheduled.append(self._take(request, budget))
            index += 1
        return scheduled

    def _make_room(self, request: Request, budget: _Budget) -> bool:
        """Blocks for the request's new tokens: first its drafts go, then the youngest running requests.

        Requests that are in this step already are older, so never preempted. False: it went itself.
        """
        while not self._kv_cache.extend(
            request, request.num_computed_tokens + self._num_new_tokens(request, budget)
        ):
            if request.draft_token_ids:
                request.draft_token_ids = ()
                continue
            victim = self.running.pop()
            self._kv_cache.free(victim)
            victim.preempt()
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, budget: _Budget) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        while self.waiting and len(self.running) < self._limits.max_num_seqs and budget.num_tokens > 0:
            request = self.waiting[0]
            prefix = self._kv_cache.find_cached_prefix(request)
            if not self._kv_cache.admit(request, prefix):
                break
            self.waiting.popleft()
            is_first_start = request.status is RequestStatus.WAITING
            request.start_running()
            request.num_computed_tokens = sum(len(cached.token_ids) for cached in prefix)
            if is_first_start:
                request.num_cached_tokens = request.num_computed_tokens
            self.running.append(request)
            if self._num_new_tokens(request, budget) > 0:
                scheduled.append(self._take(request, budget))
        return scheduled

    def _num_new_tokens(self, request: Request, budget: _Budget) -> int:
        start = request.num_computed_tokens
        end = min(request.num_tokens_with_drafts, start + budget.num_tokens)
        first_logit = request.next_prompt_logprob_position
        if first_logit is not None:
            # Every prompt position from first_logit on, but the last, costs a row of logits.
            last_end = first_logit + budget.num_prompt_logits
            if last_end < request.num_prompt_tokens - 1:
                end = min(end, last_end)
        return max(end - start, 0)

    def _take(self, request: Request, budget: _Budget) -> ScheduledRequest:
        num_new = self._num_new_tokens(request, budget)
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_new
        first_logit = request.next_prompt_logprob_position
        num_prompt_logits = 0
        if first_logit is not None:
            assert start <= first_logit, f"{request.request_id}: logits of position {first_logit} were missed"
            num_prompt_logits = max(0, min(end, request.num_prompt_tokens - 1) - first_logit)
        budget.num_tokens -= num_new
        budget.num_prompt_logits -= num_prompt_logits
        return ScheduledRequest(
            request=request,
            start=start,
            num_tokens=num_new,
            num_draft_tokens=max(0, end - request.num_tokens),
            num_prompt_logits=num_prompt_logits,
            first_prompt_logit=first_logit or 0,
            is_sampling=end >= request.num_tokens and request.max_output_tokens > 0,
            block_ids=self._kv_cache.block_ids(request),
        )

    def update(self, step: ScheduledStep, output: StepOutput) -> list[RequestProgress]:
        """Write what the model said into the requests; finished ones give their blocks back."""
        pairs = zip(step.requests, output.outputs, strict=True)
        progress = [self._update_request(scheduled, said) for scheduled, said in pairs]
        self.running = [request for request in self.running if not request.status.is_finished]
        return [news for news in progress if news is not None]

    def _update_request(self, scheduled: ScheduledRequest, said: RequestOutput) -> RequestProgress | None:
        request = scheduled.request
        request.prompt_logprobs += said.prompt_logprobs
        num_rejected = scheduled.num_draft_tokens - max(len(said.token_ids) - 1, 0)
        request.num_computed_tokens = scheduled.end - num_rejected
        request.draft_token_ids = ()
        new_tokens, status = _append_until_end(request, said)
        if request.max_output_tokens == 0 and scheduled.end == request.num_prompt_tokens:
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._kv_cache.cache_computed(request)
        if status is not None:
            self._finish(request, status)
        if not new_tokens and status is None:
            return None
        is_first_news = request.num_output_tokens == len(new_tokens)
        return RequestProgress(
            request_id=request.request_id,
            token_ids=new_tokens,
            logprobs=said.logprobs[: len(new_tokens)],
            prompt_logprobs=tuple(request.prompt_logprobs) if is_first_news else (),
            finish_reason=status.finish_reason if status is not None else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self._kv_cache.free(request)
        request.finish(status)
        del self._requests[request.request_id]

    def check_integrity(self) -> None:
        self._kv_cache.check_integrity()


def _append_until_end(request: Request, said: RequestOutput) -> tuple[tuple[int, ...], RequestStatus | None]:
    """Append sampled tokens up to the one that ends the text; what follows it is dropped."""
    if said.is_broken:
        return (), RequestStatus.FINISHED_ERROR
    ends: Iterable[int] = () if request.sampling.ignore_eos else request.vocabulary.end_token_ids
    for index, token_id in enumerate(said.token_ids):
        request.append_output(token_id)
        status = None
        if token_id in ends or token_id in request.sampling.stop_token_ids:
            status = RequestStatus.FINISHED_STOPPED
        elif request.num_output_tokens >= request.max_output_tokens:
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        if status is not None:
            return said.token_ids[: index + 1], status
    return said.token_ids, None
