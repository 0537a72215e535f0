"""From the bytes of an HTTP body to a checked body object. Nothing here reaches a log."""

import asyncio
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from bitsmith.serve.api_bodies import GenerationBody
from bitsmith.serve.api_errors import ApiError, bad_field, from_validation_error

_BODY_TIMEOUT_S = 30.0

Body = TypeVar("Body", bound=GenerationBody)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """At most max_bytes, within a time limit: 413 and 408 otherwise, without reading on."""
    too_large = ApiError(413, f"The body is larger than {max_bytes} bytes.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {_BODY_TIMEOUT_S:g} s.") from None
    except ClientDisconnect:
        raise ApiError(400, "The client left before its body had arrived.") from None
    return bytes(body)


def parse_body(data: bytes, body_class: type[Body]) -> Body:
    """Raises ApiError 400 that names the field."""
    try:
        # NaN and infinities pass here, so that the field that holds one can be named below.
        fields: Any = pydantic_core.from_json(data, allow_inf_nan=True)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not valid JSON, or it is nested too deeply.", param="body") from None
    if isinstance(fields, dict):
        for name, reason in body_class.refusals.items():
            if fields.get(name) is not None:
                raise bad_field(name, reason)
    try:
        return body_class.model_validate(fields)
    except ValidationError as error:
        raise from_validation_error(error, sorted(body_class.model_fields)) from None
