"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse


class ApiError(Exception):
    """An answer that is an error. param: the field at fault. headers: more of them, such as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def to_response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def bad_field(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param)


def from_validation_error(error: ValidationError, valid_fields: list[str]) -> ApiError:
    """The first fault, by its field's name; the value itself is not repeated."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message = fault["msg"].removeprefix("Value error, ")
    first_word = message.partition(" ")[0]
    field = str(fault["loc"][0]) if fault["loc"] else first_word if first_word in valid_fields else "body"
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        return bad_field(field[:64], f"unknown field. Valid fields: {', '.join(valid_fields)}.")
    place = ".".join(str(part) for part in fault["loc"] if not isinstance(part, str) or part.isidentifier())
    return ApiError(400, f"{place or field}: {message}", param=field)
