"""Answers that stop when the client has left: a server-sent event stream, and waiting for a whole answer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE_EVENT = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """Nobody is there to answer."""


def encode_event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends the events as they come. A client that leaves, or that takes nothing for send_timeout_s, ends
    the iteration at once, also while no event is due."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], send_timeout_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        with contextlib.suppress(ClientLeftError):
            await _first_of(writer, receive)

    async def _write(self, send: Send) -> None:
        await self._send(
            send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await self._send(send, {"type": "http.response.body", "body": event, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except (TimeoutError, OSError):
            raise ClientLeftError from None


async def unless_client_leaves(work: Awaitable[Result], request: Request) -> Result:
    """The result of `work`; raises ClientLeftError, with the work cancelled, when the client goes first."""
    return await _first_of(asyncio.ensure_future(work), request.receive)


async def _first_of(work: "asyncio.Future[Result]", receive: Receive) -> Result:
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientLeftError
    finally:
        watcher.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
