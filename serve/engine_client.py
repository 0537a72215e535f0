"""The HTTP process's view of the engine process: start it, send requests, hear of progress and death."""

import asyncio
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from bitsmith.core.errors import EXIT_REFUSED, BitsmithError, Refused, WorkFailed
from bitsmith.serve.engine_loop import EngineStats
from bitsmith.serve.engine_messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    Ping,
    StepReport,
    ToEngine,
    decode_from_engine,
    encode_to_engine,
)
from bitsmith.serve.scheduled_step import RequestProgress
from bitsmith.serve.serve_settings import ServeSettings

ENGINE_COMMAND = (sys.executable, "-m", "bitsmith.serve.engine_process")

# An engine with workers of its own ends them first; the native one ends at once.
_CLOSE_TIMEOUT_S = 10.0

Listener = Callable[[RequestProgress | None], None]  # None: the engine is dead


class EngineClient:
    """Everything but the two pipe threads runs on the event loop."""

    def __init__(self, settings: ServeSettings, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._settings = settings
        self._command = command
        self._listeners: dict[str, Listener] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._last_news = time.monotonic()
        self.ready: asyncio.Future[EngineReady] | None = None
        self.is_dead = False
        self.stats = EngineStats()

    @property
    def num_in_flight(self) -> int:
        return len(self._listeners)

    @property
    def silence_s(self) -> float:
        """Time since the engine last said anything."""
        return time.monotonic() - self._last_news

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process; `ready` is resolved, or fails with the error the engine reported."""
        loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        ours, theirs = socket.socketpair()
        options = {
            "num_threads": self._settings.num_threads,
            "trust_engine": self._settings.trust_engine,
            "runtime": asdict(self._settings.runtime),
        }
        self._process = subprocess.Popen(
            [
                *self._command,
                *("--fd", str(theirs.fileno())),
                *("--engine", str(self._settings.engine_path)),
                *("--options", json.dumps(options)),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self._socket = ours
        connection = Connection(os.dup(ours.fileno()))
        threading.Thread(target=self._receive, args=(loop, connection), daemon=True).start()
        threading.Thread(target=self._send_all, args=(connection,), daemon=True).start()

    def add(self, request: AddRequest, listener: Listener) -> None:
        if self.is_dead:
            listener(None)
            return
        self._listeners[request.request_id] = listener
        self._send(request)

    def abort(self, request_id: str) -> None:
        """Stop a request that has not ended; nothing more is heard of it."""
        if self._listeners.pop(request_id, None) is not None:
            self._send(AbortRequest(request_id))

    async def ping_for_ever(self, interval_s: float) -> None:
        """Keeps `silence_s` meaningful while there is no work."""
        while not self.is_dead:
            self._send(Ping())
            await asyncio.sleep(interval_s)

    def close(self) -> None:
        """End the engine process: the end of the pipe is the sign (shut down, because a thread reads it)."""
        self._outbox.put(None)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # not connected any more: the engine ended first
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(timeout=_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _send(self, message: ToEngine) -> None:
        self._outbox.put(encode_to_engine(message))

    def _send_all(self, connection: Connection) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                connection.send_bytes(data)
            except (OSError, ValueError):  # closed or dead: the receiving thread tells
                return

    def _receive(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        try:
            while True:
                message = decode_from_engine(connection.recv_bytes())
                loop.call_soon_threadsafe(self._on_message, message)
        except (EOFError, OSError, ValueError, TypeError):
            pass  # closed by the child's death, or by close()
        try:
            loop.call_soon_threadsafe(self._on_death)
        except RuntimeError:
            return  # the event loop has ended before the engine did

    def _on_message(self, message: FromEngine) -> None:
        assert self.ready is not None
        self._last_news = time.monotonic()
        match message:
            case EngineReady() if not self.ready.done():
                self.ready.set_result(message)
            case EngineFailed() if not self.ready.done():
                self.ready.set_exception(_as_error(message))
            case StepReport():
                self.stats = message.stats
                for progress in message.progress:
                    self._tell(progress)

    def _tell(self, progress: RequestProgress) -> None:
        listener = self._listeners.get(progress.request_id)
        if listener is None:
            return
        if progress.finish_reason is not None:
            del self._listeners[progress.request_id]
        listener(progress)

    def _on_death(self) -> None:
        self.is_dead = True
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(WorkFailed("The engine process ended before it was ready."))
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(None)


def _as_error(message: EngineFailed) -> BitsmithError:
    kind: Any = Refused if message.exit_code == EXIT_REFUSED else WorkFailed
    error: BitsmithError = kind(message.text)
    return error
