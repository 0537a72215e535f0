"""Serve an engine for one real request: the server as its own process, and a client over HTTP."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from bitsmith.core.errors import WorkFailed

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
QUESTION = "What is the capital of France? Answer in one sentence."


def ask_served_engine(engine: Path, speculate: str) -> str:
    """Start `bitsmith serve` on a free port, ask one question, stop it; returns the answer's text."""
    command = [sys.executable, "-m", "bitsmith.pipeline.main", "serve", str(engine)]
    command += ["--port", "0", "--speculate", speculate, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        return _ask(_wait_for_address(process))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _wait_for_address(process: "subprocess.Popen[str]") -> str:
    """The address that the server prints, as JSON on stdout, once it is ready."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise WorkFailed(f"The server did not start: {process.stderr.read().strip()[-500:]}")
    document: dict[str, Any] = json.loads(line)
    if "error" in document:
        raise WorkFailed(f"The server did not start: {document['error']['message']}")
    address = str(document["address"])
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == httpx.codes.OK:
                return address
        except httpx.TransportError:
            pass
        time.sleep(0.1)
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
