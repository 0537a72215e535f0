"""Serve an engine for one real request over HTTP, and stop."""

import threading
from pathlib import Path

import httpx

from bitsmith.core.errors import WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings, Speculate
from bitsmith.serve.server import EngineServer

QUESTION = "What is the capital of France? Answer in one sentence."
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0


def ask_served_engine(engine: Path, speculate: Speculate, reporter: Reporter) -> str:
    """Start a server on a free loopback port, ask one question, stop it; returns the answer's text."""
    settings = ServeSettings(engine, port=0, runtime=RuntimeSettings(speculate=speculate))
    server = EngineServer(settings, reporter)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="serve-check", daemon=True)
    thread.start()
    try:
        _wait_until_ready(server, thread, failures)
        return _ask(server.url)
    except httpx.HTTPError as error:
        raise WorkFailed(f"The served engine did not answer: {error}") from error
    finally:
        server.stop()
        thread.join(_STOP_TIMEOUT_S)


def _wait_until_ready(server: EngineServer, thread: threading.Thread, failures: list[BaseException]) -> None:
    waited_s = 0.0
    while not server.is_ready.wait(0.2):
        waited_s += 0.2
        if failures:
            raise failures[0]
        if waited_s > _START_TIMEOUT_S or not thread.is_alive():
            raise WorkFailed("The server did not become ready.")


def _ask(address: str) -> str:
    models = httpx.get(f"{address}/v1/models", timeout=10).json()
    body = {
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "temperature": 0,
    }
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"]).strip()
