"""Who may call: the API key on every route but the open ones, and the Host header on loopback.

Sits in front of the router and denies by default, so a route that is added later is closed too, and no
spelling of a path reaches the router without passing here.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from bitsmith.core.errors import Refused
from bitsmith.serve.api_errors import ApiError

OPEN_PATHS = frozenset({"/health", "/health/live"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_api_keys(path: Path | None) -> tuple[bytes, ...]:
    """One key a line. Raises Refused when the file cannot be read or holds none."""
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise Refused(f"api_key_file {path} cannot be read: {error.strerror}.") from error
    if not keys:
        raise Refused(f"api_key_file {path} holds no key; write one on a line.")
    return keys


class AccessControl:
    """ASGI middleware. api_keys empty: no key is asked for. host: the address the server is bound to."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[bytes], host: str) -> None:
        self._app = app
        self._key_digests = tuple(hashlib.sha256(key).digest() for key in api_keys)
        self._hosts = _LOOPBACK_NAMES | {host} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        error = self._objection(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.to_response()(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if self._hosts is not None:
            hosts = [value for name, value in headers if name == b"host"]
            if len(hosts) != 1 or _host_name(hosts[0]) not in self._hosts:
                # A page of another site, whose name was pointed at this machine, sends its own name.
                return ApiError(403, "This server answers on loopback names only.", code="host_not_allowed")
        if self._key_digests and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return ApiError(
                401,
                "An API key is required: Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Every key is compared, in constant time, on digests of bytes: the time taken tells nothing."""
        given = b"".join(value for name, value in headers if name == b"authorization")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)


def _host_name(host: bytes) -> str:
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
