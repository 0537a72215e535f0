"""Keys on every route but health; loopback names only; no way around either."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bitsmith.core.errors import Refused
from bitsmith.serve.access_control import AccessControl, read_api_keys


async def _status(app: Any, path: str, headers: dict[str, bytes], method: str = "GET") -> int:
    """Straight to the application, so that no client tidies the path."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost:80"), *((k.encode(), v) for k, v in headers.items())],
    }  # fmt: skip
    scope["headers"] = list(dict(scope["headers"]).items())  # type: ignore[arg-type]
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def _reached(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", {}, 401),
        ("/v1/models", {"authorization": b"Bearer secret-1"}, 299),
        ("/v1/models", {"authorization": b"bearer secret-2"}, 299),
        ("/v1/models", {"authorization": b"Bearer secret-3"}, 401),
        ("/v1/models", {"authorization": b"Basic secret-1"}, 401),
        ("/v1/models", {"authorization": b"Bearer \xff\xe9"}, 401),
        ("/v1/models", {"authorization": b"Bearer "}, 401),
        ("/health", {}, 299),
        ("/health/live", {}, 299),
        ("/metrics", {}, 401),
        ("/nothing", {}, 401),
        ("//health", {}, 401),
        ("/health/", {}, 401),
        ("/health/../v1/models", {}, 401),
        ("/health%2f..%2fv1/models", {}, 401),
        ("/health", {"host": b"evil.example"}, 403),
        ("/health", {"host": b"127.0.0.1:8000"}, 299),
        ("/health", {"host": b"[::1]:8000"}, 299),
        ("/health", {"host": b"localhost.evil.example"}, 403),
        ("/health", {"host": b""}, 403),
    ],
)
def test_every_route_is_closed_but_health(path: str, headers: dict[str, bytes], status: int) -> None:
    app = AccessControl(_reached, (b"secret-1", b"secret-2"), "127.0.0.1")
    assert asyncio.run(_status(app, path, headers)) == status
    assert asyncio.run(_status(app, path, headers, "DELETE")) == status


def test_beyond_loopback_any_host_name_is_taken() -> None:
    app = AccessControl(_reached, (), "0.0.0.0")
    assert asyncio.run(_status(app, "/v1/models", {"host": b"model.internal"})) == 299


def test_a_websocket_is_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app = AccessControl(_reached, (), "127.0.0.1")
    asyncio.run(app({"type": "websocket", "path": "/v1/models", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b" one \n\ntwo\r\n")
    assert read_api_keys(path) == (b"one", b"two")
    assert read_api_keys(None) == ()
    path.write_bytes(b"\n")
    with pytest.raises(Refused, match="holds no key"):
        read_api_keys(path)
    with pytest.raises(Refused, match="cannot be read"):
        read_api_keys(tmp_path / "none")
