"""The loop's body: schedule, execute, update. Knows neither text nor processes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bitsmith.core.model_input import BLOCK_SIZE
from bitsmith.serve.model_runner import ModelRunner, StepModel
from bitsmith.serve.request import Request
from bitsmith.serve.scheduled_step import RequestProgress
from bitsmith.serve.scheduler import Scheduler
from bitsmith.serve.speculation import NoSpeculation, SpecDecodeStats, Speculator


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How the engine stands after a step; counts since start unless they say what is now."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    kv_cache_bytes: int = 0
    num_free_kv_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    speculation: SpecDecodeStats = field(default_factory=SpecDecodeStats)


class EngineLoop:
    """Requests in, progress out."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: StepModel,
        num_kv_blocks: int,
        speculator: Speculator | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = ModelRunner(model)
        self._num_kv_blocks = num_kv_blocks
        self._kv_cache_bytes = num_kv_blocks * BLOCK_SIZE * model.kv_bytes_per_token
        self._speculator: Speculator = speculator or NoSpeculation()
        self._num_steps = 0
        self._num_scheduled_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    @property
    def running(self) -> Sequence[Request]:
        return self._scheduler.running

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_kv_blocks=self._num_kv_blocks,
            kv_cache_bytes=self._kv_cache_bytes,
            num_free_kv_blocks=self._scheduler.num_free_kv_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            speculation=self._speculator.stats,
        )

    def add(self, request: Request) -> None:
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def step(self) -> list[RequestProgress]:
        self._speculator.propose(self._scheduler.running)
        step = self._scheduler.schedule()
        start = time.perf_counter()
        output = self._runner.execute(step)
        self._speculator.observe(step, output, time.perf_counter() - start)
        self._num_steps += 1
        self._num_scheduled_tokens += step.num_tokens
        return self._scheduler.update(step, output)

    def check_integrity(self) -> None:
        """Raise IntegrityError when the books of the KV cache do not balance; called when idle."""
        self._scheduler.check_integrity()
