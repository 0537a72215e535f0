"""Runs the choices of one HTTP request on the engine and yields what is new in each."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bitsmith.serve.api_errors import ApiError
from bitsmith.serve.choice_plan import PlannedChoice
from bitsmith.serve.engine_client import EngineClient
from bitsmith.serve.metrics import ServerMetrics
from bitsmith.serve.scheduled_step import RequestProgress
from bitsmith.serve.text_collector import TextCollector, TextDelta
from bitsmith.serve.token_bytes import TokenBytes

_MAX_RETRY_AFTER_S = 60


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: each prompt once, whatever n; outputs of all choices."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class _Live:
    choice: PlannedChoice
    collector: TextCollector
    last_news: float
    has_tokens: bool = False


@dataclass(slots=True)
class Generation:
    """The choices of one HTTP request; to be iterated once."""

    choices: Sequence[PlannedChoice]
    usage: Usage = field(default_factory=Usage)


class GenerationService:
    """Admits requests, follows them, and lets nothing run on for a client that has left."""

    def __init__(
        self, client: EngineClient, metrics: ServerMetrics, token_bytes: TokenBytes, capacity: int
    ) -> None:
        """capacity: choices that may be running or waiting at once."""
        self._client = client
        self._metrics = metrics
        self._token_bytes = token_bytes
        self._capacity = capacity
        self._num_preparing = 0
        self._shutdown = asyncio.Event()

    def admit(self, num_choices: int) -> None:
        """Raises 429 with a hint when the queue is full."""
        num_taken = self._client.num_in_flight + self._num_preparing
        if num_taken + num_choices > self._capacity:
            raise ApiError(
                429,
                f"The server is full: {num_taken} of {self._capacity} places are taken.",
                code="server_full",
                headers={"Retry-After": str(self._retry_after_s())},
            )

    def _retry_after_s(self) -> int:
        """The mean time a request took so far: about when places come free."""
        mean = self._metrics.e2e_latency_s.mean or 1.0
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(mean)))

    def hold_place(self) -> None:
        """A place for a request whose prompt is still being tokenized."""
        self.admit(1)
        self._num_preparing += 1

    def release_place(self) -> None:
        self._num_preparing -= 1

    def stop_all(self) -> None:
        """The deadline of a shutdown has come: live requests end with an error."""
        self._shutdown.set()

    async def run(self, generation: Generation) -> AsyncGenerator[tuple[PlannedChoice, TextDelta]]:
        """News of all choices as it comes, until each has ended. Closed early, the rest is aborted.

        Raises ApiError 503 when the engine dies or the server shuts down, 500 when a choice breaks.
        """
        inbox: asyncio.Queue[tuple[_Live, RequestProgress | None]] = asyncio.Queue()
        arrival = time.monotonic()
        live = [self._start(choice, inbox, arrival) for choice in generation.choices]
        self._count_prompts(generation)
        num_left = len(live)
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        try:
            while num_left:
                one, progress = await self._next(inbox, shutdown)
                if one.collector.finish_reason is not None:
                    continue  # ended by a stop string; the engine had not heard yet
                if progress is None:
                    raise ApiError(503, "The engine has stopped working.", code="engine_dead")
                if progress.finish_reason == "error":
                    raise ApiError(500, "The model gave no valid numbers for this request.")
                delta = self._follow(one, progress, arrival, generation.usage)
                num_left -= delta.finish_reason is not None
                yield one.choice, delta
        finally:
            shutdown.cancel()
            for one in live:
                if one.collector.finish_reason is None:
                    self._metrics.num_finished["abort"] += 1
                self._client.abort(one.choice.request.request_id)

    def _start(
        self,
        choice: PlannedChoice,
        inbox: "asyncio.Queue[tuple[_Live, RequestProgress | None]]",
        arrival: float,
    ) -> _Live:
        request = choice.request
        one = _Live(
            choice,
            TextCollector(self._token_bytes, request.prompt_token_ids, request.sampling),
            last_news=arrival,
        )
        self._client.add(request, lambda progress: inbox.put_nowait((one, progress)))
        return one

    async def _next(
        self,
        inbox: "asyncio.Queue[tuple[_Live, RequestProgress | None]]",
        shutdown: "asyncio.Future[Literal[True]]",
    ) -> tuple[_Live, RequestProgress | None]:
        if not inbox.empty():
            return inbox.get_nowait()
        getter = asyncio.ensure_future(inbox.get())
        try:
            await asyncio.wait((getter, shutdown), return_when=asyncio.FIRST_COMPLETED)
            if not getter.done():
                raise ApiError(503, "The server is shutting down.", code="shutting_down")
            return getter.result()
        finally:
            getter.cancel()

    def _follow(self, one: _Live, progress: RequestProgress, arrival: float, usage: Usage) -> TextDelta:
        delta = one.collector.feed(progress)
        now = time.monotonic()
        if delta.token_ids:
            if one.has_tokens:
                self._metrics.itl_s.observe(now - one.last_news)
            else:
                self._metrics.ttft_s.observe(now - arrival)
                self._metrics.num_cached_prompt_tokens += delta.num_cached_tokens
                if one.choice.is_first_of_prompt:
                    usage.num_cached_tokens += delta.num_cached_tokens
            one.has_tokens, one.last_news = True, now
        usage.num_output_tokens += len(delta.token_ids)
        self._metrics.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._metrics.num_finished[delta.finish_reason] += 1
            self._metrics.e2e_latency_s.observe(now - arrival)
            if one.collector.is_stopped_by_text:
                self._client.abort(progress.request_id)
        return delta

    def _count_prompts(self, generation: Generation) -> None:
        prompts = {choice.prompt_index: choice.request.prompt_token_ids for choice in generation.choices}
        generation.usage.num_prompt_tokens = sum(len(prompt) for prompt in prompts.values())
        self._metrics.num_prompt_tokens += generation.usage.num_prompt_tokens
