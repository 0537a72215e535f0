"""The native engine's own process: messages in, steps, messages out. Knows neither HTTP nor text.

When the parent is gone it ends at once, in the middle of a step if need be.
"""

import os
from pathlib import Path
from typing import Protocol

from bitsmith.serve.engine_child import EngineOptions, Inbox, Send, run_engine_child
from bitsmith.serve.engine_loop import EngineLoop
from bitsmith.serve.engine_messages import AbortRequest, AddRequest, EngineReady, Ping, StepReport, ToEngine
from bitsmith.serve.engine_setup import build_engine_loop, resolve_limits
from bitsmith.serve.model_runner import StepModel


class LoadModel(Protocol):
    """Loads the engine at a path; also returns where its tokenizer is."""

    def __call__(self, path: Path, num_threads: int | None, *, trust: bool) -> tuple[StepModel, Path]: ...


def load_engine(path: Path, num_threads: int | None, *, trust: bool) -> tuple[StepModel, Path]:
    # Imported here, so that the HTTP process never loads it.
    from bitsmith.compile.engine import Engine, leave_threads_to_operators

    engine = Engine.load(path, trust=trust, num_threads=num_threads)
    leave_threads_to_operators()
    return engine, engine.tokenizer_path


class EngineProcess:
    """The loop around EngineLoop."""

    def __init__(self, loop: EngineLoop, ready: EngineReady) -> None:
        self._loop = loop
        self.ready = ready

    def run(self, inbox: Inbox, send: Send) -> None:
        """For ever: take what has come, make a step, report. Without work: check the books and wait."""
        while True:
            if not self._loop.has_unfinished:
                self._loop.check_integrity()
                self._take(inbox.get(), send)
            while not inbox.empty():
                self._take(inbox.get(), send)
            if self._loop.has_unfinished:
                progress = self._loop.step()
                send(StepReport(tuple(progress), self._loop.stats))

    def on_parent_gone(self) -> None:
        os._exit(0)

    def _take(self, message: ToEngine | None, send: Send) -> None:
        match message:
            case AddRequest():
                self._loop.add(message.to_request())
            case AbortRequest():
                self._loop.abort(message.request_id)
                send(StepReport((), self._loop.stats))
            case Ping():
                send(StepReport((), self._loop.stats))


def run_engine_process(load_model: LoadModel) -> None:
    """Entry of the child process."""

    def open_engine(options: EngineOptions) -> EngineProcess:
        model, tokenizer_path = load_model(options.engine, options.num_threads, trust=options.trust_engine)
        limits = resolve_limits(model, options.runtime)
        loop = build_engine_loop(model, options.runtime, limits)
        return EngineProcess(loop, EngineReady(limits, str(tokenizer_path), model.arithmetic))

    run_engine_child(open_engine)


if __name__ == "__main__":
    run_engine_process(load_engine)
