"""The engine process around TensorRT-LLM's LLM API: the same messages as the native one, another engine.

TensorRT-LLM schedules, batches and keeps the KV cache by itself; here requests are handed over and their news
passed on. KV-cache and step counts in the metrics stay 0: they are TensorRT-LLM's own.
"""

import asyncio
import os
import sys
import threading
from dataclasses import dataclass, field

from bitsmith.compile.tensorrt_llm_api import (
    LlmResult,
    LoadedLlm,
    load_llm,
    require_llm_api,
    sampling_arguments,
)
from bitsmith.core.artifact import read_finished
from bitsmith.serve.engine_child import EngineOptions, Inbox, Send, run_engine_child
from bitsmith.serve.engine_loop import EngineStats
from bitsmith.serve.engine_messages import AbortRequest, AddRequest, EngineReady, Ping, StepReport, ToEngine
from bitsmith.serve.llm_api_limits import describe_engine
from bitsmith.serve.llm_api_progress import failure_of, progress_of
from bitsmith.serve.scheduled_step import RequestProgress

_SHUTDOWN_S = 8.0  # for TensorRT-LLM to end its workers once the parent is gone


@dataclass(slots=True)
class LlmApiProcess:
    """One asyncio task for each live request."""

    loaded: LoadedLlm
    ready: EngineReady
    _live: dict[str, LlmResult | None] = field(default_factory=dict)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def run(self, inbox: Inbox, send: Send) -> None:
        try:
            asyncio.run(self._run(inbox, send))
        finally:
            self.loaded.llm.shutdown()

    def on_parent_gone(self) -> None:
        """`run` sees the end of the inbox; if it hangs, the process ends all the same."""
        timer = threading.Timer(_SHUTDOWN_S, os._exit, (0,))
        timer.daemon = True
        timer.start()

    async def _run(self, inbox: Inbox, send: Send) -> None:
        while (message := await asyncio.to_thread(inbox.get)) is not None:
            self._take(message, send)
        for task in self._tasks:
            task.cancel()

    def _take(self, message: ToEngine, send: Send) -> None:
        match message:
            case AddRequest():
                self._live[message.request_id] = None
                task = asyncio.create_task(self._follow(message, send))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case AbortRequest():
                result = self._live.pop(message.request_id, None)
                if result is not None:
                    result.abort()
                self._report((), send)
            case Ping():
                self._report((), send)

    async def _follow(self, request: AddRequest, send: Send) -> None:
        """An error of one request ends that request; only its kind is logged, as texts may quote a prompt."""
        try:
            await self._generate(request, send)
        except Exception as error:
            print(f"TensorRT-LLM refused or failed a request: {type(error).__name__}", file=sys.stderr)
            if self._live.pop(request.request_id, self) is not self:
                self._report((failure_of(request.request_id),), send)

    async def _generate(self, request: AddRequest, send: Send) -> None:
        if request.request_id not in self._live:
            return  # aborted before it began
        arguments = sampling_arguments(
            request.sampling, request.max_output_tokens, request.seed, request.vocabulary.end_token_ids
        )
        result = self.loaded.llm.generate_async(
            list(request.prompt_token_ids), self.loaded.make_params(**arguments), streaming=True
        )
        self._live[request.request_id] = result
        wants_logprobs = request.sampling.num_logprobs is not None
        num_told = 0
        async for step in result:
            if request.request_id not in self._live:
                return
            progress = progress_of(
                request.request_id, step.outputs[0], num_told, wants_logprobs=wants_logprobs
            )
            num_told += len(progress.token_ids)
            if progress.finish_reason is not None:
                del self._live[request.request_id]
                self._report((progress,), send)
                return
            if progress.token_ids:
                self._report((progress,), send)
        if self._live.pop(request.request_id, self) is not self:  # ended without saying why
            self._report((failure_of(request.request_id),), send)

    def _report(self, progress: tuple[RequestProgress, ...], send: Send) -> None:
        send(StepReport(progress, EngineStats(num_running=len(self._live))))


def open_llm_api(options: EngineOptions) -> LlmApiProcess:
    manifest = read_finished(options.engine, "engine")
    require_llm_api(options.engine, manifest, trust=options.trust_engine)
    ready = describe_engine(options.engine, manifest)
    return LlmApiProcess(load_llm(options.engine, manifest), ready)


if __name__ == "__main__":
    run_engine_child(open_llm_api)
