"""The engine's own process: messages in, steps, messages out. Knows neither HTTP nor text.

It lives as long as its parent: when the parent's end of the pipe closes, for whatever reason, it ends at
once, in the middle of a step if need be. Interrupts from a terminal or a supervisor are the parent's to
handle, so that live answers can be finished.
"""

import argparse
import json
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from bitsmith.core.errors import EXIT_WORK_FAILED, BitsmithError
from bitsmith.serve.engine_loop import EngineLoop
from bitsmith.serve.engine_messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    Ping,
    StepReport,
    ToEngine,
    decode_to_engine,
    encode_from_engine,
)
from bitsmith.serve.engine_setup import build_engine_loop, resolve_limits
from bitsmith.serve.model_runner import StepModel
from bitsmith.serve.serve_settings import RuntimeSettings


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

    def __init__(self, loop: EngineLoop, inbox: "queue.SimpleQueue[ToEngine]") -> None:
        self._loop = loop
        self._inbox = inbox

    def run(self, send: Callable[[FromEngine], None]) -> None:
        """For ever: take what has come, make a step, report. Without work: check the books and wait."""
        while True:
            if not self._loop.has_unfinished:
                self._loop.check_integrity()
                self._take(self._inbox.get(), send)
            while not self._inbox.empty():
                self._take(self._inbox.get(), send)
            if self._loop.has_unfinished:
                progress = self._loop.step()
                send(StepReport(tuple(progress), self._loop.stats))

    def _take(self, message: ToEngine, send: Callable[[FromEngine], None]) -> None:
        match message:
            case AddRequest():
                self._loop.add(message.to_request())
            case AbortRequest():
                self._loop.abort(message.request_id)
                send(StepReport((), self._loop.stats))
            case Ping():
                send(StepReport((), self._loop.stats))


def run_engine_process(load_model: LoadModel) -> None:
    """Entry of the child process; its arguments are written by EngineClient."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(arguments.fd)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()

    def send(message: FromEngine) -> None:
        connection.send_bytes(encode_from_engine(message))

    options = arguments.options
    settings = TypeAdapter(RuntimeSettings).validate_python(options["runtime"])
    try:
        model, tokenizer_path = load_model(
            arguments.engine, options["num_threads"], trust=options["trust_engine"]
        )
        limits = resolve_limits(model, settings)
        loop = build_engine_loop(model, settings, limits)
    except BitsmithError as error:
        send(EngineFailed(str(error), error.exit_code))
        return
    except Exception as error:  # the parent shows one line; the traceback goes to stderr
        traceback.print_exc()
        send(EngineFailed(f"The engine could not be loaded: {error}", EXIT_WORK_FAILED))
        return
    send(EngineReady(limits, str(tokenizer_path), model.arithmetic))
    EngineProcess(loop, inbox).run(send)


def _receive(connection: Connection, inbox: "queue.SimpleQueue[ToEngine]") -> None:
    try:
        while True:
            inbox.put(decode_to_engine(connection.recv_bytes()))
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        os._exit(0)


if __name__ == "__main__":
    run_engine_process(load_engine)
