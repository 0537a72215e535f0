"""What every engine process does, whatever runs the model: arguments, pipe, signals, failures.

It lives as long as its parent: when the parent's end of the pipe closes, for whatever reason, the engine is
told to end. Interrupts from a terminal or a supervisor are the parent's to handle, so that live answers can
be finished.
"""

import argparse
import json
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from bitsmith.core.errors import EXIT_WORK_FAILED, BitsmithError
from bitsmith.serve.engine_messages import (
    EngineFailed,
    EngineReady,
    FromEngine,
    ToEngine,
    decode_to_engine,
    encode_from_engine,
)
from bitsmith.serve.serve_settings import RuntimeSettings

Inbox = queue.SimpleQueue[ToEngine | None]  # None: the parent is gone
Send = Callable[[FromEngine], None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What EngineClient writes on the command line."""

    engine: Path
    num_threads: int | None
    trust_engine: bool
    runtime: RuntimeSettings


class OpenedEngine(Protocol):
    """An engine that is loaded."""

    @property
    def ready(self) -> EngineReady: ...

    def run(self, inbox: Inbox, send: Send) -> None:
        """Until None comes from the inbox."""
        ...

    def on_parent_gone(self) -> None:
        """Called from the thread that saw it; `run` may be in the middle of a step."""
        ...


def run_engine_child(open_engine: Callable[[EngineOptions], OpenedEngine]) -> None:
    """Entry of an engine process; its arguments are written by EngineClient."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = _EngineChild(Connection(arguments.fd))
    options = TypeAdapter(EngineOptions).validate_python({"engine": arguments.engine} | arguments.options)
    try:
        engine = open_engine(options)
    except BitsmithError as error:
        child.send(EngineFailed(str(error), error.exit_code))
        return
    except Exception as error:  # the parent shows one line; the traceback goes to stderr
        traceback.print_exc()
        child.send(EngineFailed(f"The engine could not be loaded: {error}", EXIT_WORK_FAILED))
        return
    child.engine = engine
    child.send(engine.ready)
    engine.run(child.inbox, child.send)


class _EngineChild:
    """The pipe to the parent. engine None: still being loaded."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.inbox: Inbox = queue.SimpleQueue()
        self.engine: OpenedEngine | None = None
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: FromEngine) -> None:
        self._connection.send_bytes(encode_from_engine(message))

    def _receive(self) -> None:
        try:
            while True:
                self.inbox.put(decode_to_engine(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass  # the parent is gone
        finally:
            if self.engine is None:
                os._exit(0)
            self.inbox.put(None)
            self.engine.on_parent_gone()
