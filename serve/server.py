"""The server process: start the engine process, listen, become ready, drain, stop."""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.serve.access_control import is_loopback, read_api_keys
from bitsmith.serve.choice_plan import ChoicePlanner
from bitsmith.serve.engine_client import ENGINE_COMMAND, EngineClient
from bitsmith.serve.engine_messages import EngineReady
from bitsmith.serve.generation import GenerationService
from bitsmith.serve.generation_api import LoadedModel
from bitsmith.serve.http_api import HttpApi
from bitsmith.serve.metrics import ServerMetrics
from bitsmith.serve.prompt_encoder import PromptEncoder
from bitsmith.serve.serve_settings import ServeSettings
from bitsmith.serve.token_bytes import TokenBytes, load_vocabulary

_PING_INTERVAL_S = 2.0
_DRAIN_POLL_S = 0.05
_LAST_WORDS_S = 2  # for the error events of streams that the drain deadline cuts


class EngineServer:
    """One server. `run` blocks until it has stopped; `stop`, from any thread or signal, begins the drain."""

    def __init__(
        self, settings: ServeSettings, reporter: Reporter, engine_command: Sequence[str] = ENGINE_COMMAND
    ) -> None:
        """Raises Refused when the address or the API keys cannot be had: before the engine is loaded."""
        self._settings = settings
        self._reporter = reporter
        self._api_keys = read_api_keys(settings.api_key_file)
        self._socket = _bind(settings)
        self._client = EngineClient(settings, engine_command)
        self._metrics = ServerMetrics()
        self._api = HttpApi(settings, self._client, self._metrics, reporter)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = asyncio.Event()
        self._is_stop_asked = False  # also before there is an event loop
        self.is_ready = threading.Event()

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def engine_process_id(self) -> int | None:
        return self._client.process_id

    def run(self) -> None:
        """Raises what the engine process reported when it could not load."""
        if not is_loopback(self._settings.host) and not self._api_keys:
            self._reporter.warn(f"{self.url} is open to the network without an API key (--api-key-file).")
        try:
            asyncio.run(self._run())
        finally:
            self._client.close()
            self._socket.close()

    def stop(self) -> None:
        self._is_stop_asked = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._stop_asked.set)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_stop_asked:
            return
        self._client.start()
        config = uvicorn.Config(
            self._api.build(self._api_keys),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            timeout_keep_alive=30,
        )
        server = _Uvicorn(config, self.stop)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        pinging = asyncio.create_task(self._client.ping_for_ever(_PING_INTERVAL_S))
        stopping = asyncio.create_task(self._stop_asked.wait())
        try:
            loading = asyncio.create_task(self._become_ready())
            await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
                await self._drain(server)
        finally:
            for task in (loading, pinging, stopping):
                task.cancel()
            server.should_exit = True
            await asyncio.wait((serving,))
        serving.result()

    async def _become_ready(self) -> None:
        assert self._client.ready is not None
        self._reporter.say(f"Loading {self._settings.engine_path} ...")
        ready = await self._client.ready
        self._api.model = await asyncio.to_thread(self._load_model, ready)
        self._api.readiness.is_loaded = True
        self.is_ready.set()
        self._reporter.say(
            f"Serving {self._settings.model_name!r} ({ready.arithmetic}) at {self.url}/v1: "
            f"{ready.limits.describe()}."
        )

    def _load_model(self, ready: EngineReady) -> LoadedModel:
        path = Path(ready.tokenizer_path)
        tokenizer = load_tokenizer(path)
        token_bytes = TokenBytes(tokenizer)
        if token_bytes.num_token_ids > ready.limits.vocab_size:
            raise Refused(
                f"The tokenizer at {path} has {token_bytes.num_token_ids} ids, the engine only "
                f"{ready.limits.vocab_size}: they do not belong together."
            )
        vocabulary = load_vocabulary(tokenizer, token_bytes, path)
        capacity = ready.limits.max_num_seqs + self._settings.max_num_waiting
        return LoadedModel(
            encoder=PromptEncoder(tokenizer),
            planner=ChoicePlanner(ready, vocabulary, token_bytes),
            service=GenerationService(self._client, self._metrics, token_bytes, capacity),
            token_bytes=token_bytes,
            max_model_len=ready.limits.max_model_len,
            arithmetic=ready.arithmetic,
        )

    async def _drain(self, server: uvicorn.Server) -> None:
        """New requests are refused; live ones go on, up to the deadline or a second signal."""
        self._api.readiness.is_draining = True
        model = self._api.model
        assert model is not None
        self._reporter.say(f"Stopping: {self._client.num_in_flight} requests are live.")
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.drain_timeout_s
        while self._client.num_in_flight and now() < deadline and not server.force_exit:
            await asyncio.sleep(_DRAIN_POLL_S)
        # Answers that are complete may still be on their way to slow clients.
        server.config.timeout_graceful_shutdown = max(_LAST_WORDS_S, round(deadline - now()))
        if self._client.num_in_flight:
            self._reporter.warn(
                f"{self._client.num_in_flight} requests were cut after {self._settings.drain_timeout_s:g} s."
                if not server.force_exit
                else f"{self._client.num_in_flight} requests were cut by a second signal."
            )
            model.service.stop_all()
        model.encoder.close()


class _Uvicorn(uvicorn.Server):
    """The first signal begins the drain; a second one ends at once."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop
        self._num_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self.force_exit = self._num_signals > 1
        self._stop()


def _bind(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        raise Refused(
            f"host {settings.host} port {settings.port}: {error.strerror}. Choose another --port or --host."
        ) from error
    return bound


def serve_engine(settings: ServeSettings, reporter: Reporter) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises Refused or WorkFailed when serving cannot begin."""
    EngineServer(settings, reporter).run()
