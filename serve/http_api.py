"""The routes, and what every answer has in common: errors in OpenAI's shape, nothing of a prompt in a log."""

import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from bitsmith.core.progress import Reporter
from bitsmith.serve.access_control import AccessControl
from bitsmith.serve.api_errors import ApiError
from bitsmith.serve.engine_client import EngineClient
from bitsmith.serve.event_stream import ClientLeftError
from bitsmith.serve.generation_api import GenerationApi, LoadedModel
from bitsmith.serve.metrics import ServerMetrics
from bitsmith.serve.readiness import ReadinessProbe
from bitsmith.serve.serve_settings import ServeSettings

Endpoint = Callable[[Request], Awaitable[Response]]

_RETRY_WHEN_NOT_READY_S = 5
_CLIENT_LEFT_STATUS = 499  # never received by anybody


class HttpApi:
    """The application; `model` is set when the engine is ready."""

    def __init__(
        self, settings: ServeSettings, client: EngineClient, metrics: ServerMetrics, reporter: Reporter
    ) -> None:
        self._settings = settings
        self._client = client
        self._metrics = metrics
        self._reporter = reporter
        self._started_at = int(time.time())
        self.readiness = ReadinessProbe(client, settings.stall_timeout_s)
        self.model: LoadedModel | None = None

    def build(self, api_keys: tuple[bytes, ...]) -> ASGIApp:
        routes = [
            self._route("/v1/chat/completions", "POST", lambda request: self._generation().chat(request)),
            self._route("/v1/completions", "POST", lambda request: self._generation().complete(request)),
            self._route("/v1/models", "GET", self._models),
            self._route("/v1/models/{name:path}", "GET", self._one_model),
            self._route("/health", "GET", self._health),
            self._route("/health/live", "GET", self._live),
            self._route("/metrics", "GET", self._metrics_text),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
        app.router.redirect_slashes = False
        return AccessControl(app, api_keys, self._settings.host)

    def _route(self, path: str, method: str, endpoint: Endpoint) -> Route:
        return Route(path, self._guarded(endpoint), methods=[method])

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ApiError as error:
                self._metrics.num_refused[error.status] += 1
                return error.to_response()
            except ClientLeftError:
                return Response(status_code=_CLIENT_LEFT_STATUS)
            except Exception as error:
                return self._on_failure(error).to_response()

        return answer

    def _on_failure(self, error: Exception) -> ApiError:
        """Where and what kind only goes to the log: the message could hold a part of a prompt."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self._reporter.warn(f"{type(error).__name__} in {frame.filename}:{frame.lineno}; answered 500")
        self._metrics.num_refused[500] += 1
        return ApiError(500, "An error in the server; its log says where.")

    def _generation(self) -> GenerationApi:
        if not self.readiness.is_ready or self.model is None:
            raise ApiError(
                503,
                self.readiness.reason,
                code=self.readiness.state.value,
                headers={"Retry-After": str(_RETRY_WHEN_NOT_READY_S)},
            )
        return GenerationApi(self._settings, self.model, self._on_failure)

    async def _health(self, request: Request) -> Response:
        """Ready to serve: 200, else 503 with the reason."""
        state = self.readiness.state
        return JSONResponse({"status": state.value}, status_code=200 if self.readiness.is_ready else 503)

    async def _live(self, request: Request) -> Response:
        """The HTTP process answers; says nothing of the engine."""
        return JSONResponse({"status": "alive"})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_fields()]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._settings.model_name:
            raise ApiError(
                404, f"This server has only {self._settings.model_name!r}.", code="model_not_found"
            )
        return JSONResponse(self._model_fields())

    def _model_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "bitsmith",
        }
        if self.model is not None:
            fields |= {"max_model_len": self.model.max_model_len, "arithmetic": self.model.arithmetic}
        return fields

    async def _metrics_text(self, request: Request) -> Response:
        text = self._metrics.render(self._client.stats, is_ready=self.readiness.is_ready)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, f"{error.detail}.", headers=headers).to_response()
