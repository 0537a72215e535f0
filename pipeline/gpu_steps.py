"""The steps of the GPU check: what is there, quantize, build with parity, serve and measure.

Each stage is a `bitsmith` command of its own, so that the check does what a user would do, and a killed one
leaves nothing half written.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from bitsmith.core.errors import EXIT_REFUSED, Refused, WorkFailed
from bitsmith.pipeline.gpu_check import Step

Found = Mapping[str, Mapping[str, Any]]

MODEL = "smollm2-135m"
_PROGRAM = (sys.executable, "-m", "bitsmith.pipeline.main")
_NUM_STREAMS, _NUM_TOKENS = 16, 128


def gpu_steps(out: Path) -> list[Step]:
    """In the order in which they run. out: directory of all that is written."""
    quantized, engine, exported = str(out / "quantized"), str(out / "engine"), str(out / "pytorch")
    quantize = ("quantize", MODEL, "--scheme", "w8a8-fp8", "--kv-cache", "fp8", "--for", "tensorrt-llm")
    calibrate = ("--num-samples", "16", "--seq-len", "256", "--resume", "--out", quantized)
    limits = ("--max-batch-size", str(_NUM_STREAMS), "--max-model-len", "1024")
    build = ("compile", quantized, "--target", "tensorrt-llm", "--require-engine", *limits, "--out", engine)
    export = ("compile", quantized, "--target", "tensorrt-llm-pytorch", *limits, "--out", exported)
    return [
        Step("GPU", (), lambda left_s, found: _gpu()),
        Step("tensorrt_llm", ("GPU",), lambda left_s, found: _tensorrt_llm()),
        Step("quantize", ("tensorrt_llm",), lambda left_s, found: _command((*quantize, *calibrate), left_s)),
        Step("build and parity", ("quantize",), lambda left_s, found: _build(build, found, left_s)),
        Step("PyTorch checkpoint", ("quantize",), lambda left_s, found: _build(export, found, left_s)),
        Step("serve the engine", ("build and parity",), lambda left_s, found: _measure(engine, left_s)),
        Step("serve PyTorch", ("PyTorch checkpoint",), lambda left_s, found: _measure(exported, left_s)),
    ]


def _gpu() -> dict[str, Any]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise Refused("no NVIDIA GPU is seen: nvidia-smi is not on PATH")
    query = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    done = subprocess.run((tool, *query), capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        raise Refused(f"nvidia-smi finds no GPU (exit code {done.returncode})")
    return {"gpus": done.stdout.strip().splitlines()}


def _tensorrt_llm() -> dict[str, Any]:
    try:
        return {"version": version("tensorrt_llm")}
    except PackageNotFoundError:
        raise Refused("tensorrt_llm is not installed in this Python") from None


def _build(command: tuple[str, ...], found: Found, left_s: float) -> dict[str, Any]:
    """For the release that is installed here."""
    return _command((*command, "--trtllm-version", str(found["tensorrt_llm"]["version"])), left_s)


def _command(arguments: tuple[str, ...], left_s: float) -> dict[str, Any]:
    """Run a bitsmith command. Raises Refused when refused or out of time, WorkFailed when it failed."""
    try:
        done = subprocess.run(
            (*_PROGRAM, *arguments, "--json"), capture_output=True, text=True, timeout=left_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refused("the time limit was reached; run the check again to go on") from None
    if done.returncode == 0:
        return {"command": f"bitsmith {' '.join(arguments)}"}
    lines = done.stderr.strip().splitlines()
    error = Refused if done.returncode == EXIT_REFUSED else WorkFailed
    raise error(lines[-1] if lines else f"exit code {done.returncode}")


def _measure(artifact: str, left_s: float) -> dict[str, Any]:
    """Tokens per second of one stream, and of many at once, over HTTP."""
    deadline = time.monotonic() + left_s
    with _served(artifact, left_s) as server:
        one = _tokens_per_s(server, 1, deadline)
        many = _tokens_per_s(server, _NUM_STREAMS, deadline)
    return {"tokens/s, 1 stream": round(one, 1), f"tokens/s, {_NUM_STREAMS} streams": round(many, 1)}


@contextmanager
def _served(artifact: str, left_s: float) -> Iterator[Mapping[str, str]]:
    """The document that a server prints when it is ready; the server ends with the block."""
    command = (*_PROGRAM, "serve", artifact, "--port", "0", "--json")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(left_s, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        document = json.loads(process.stdout.readline() or "{}")
        if "url" not in document:
            raise WorkFailed(document.get("error", {}).get("message", "the server did not become ready"))
        yield document
    finally:
        timer.cancel()
        process.terminate()
        process.wait(30)


def _tokens_per_s(server: Mapping[str, str], num_streams: int, deadline: float) -> float:
    body = {
        "model": server["model"], "prompt": "The history of the sea is", "n": num_streams, "temperature": 1.0,
        "max_tokens": _NUM_TOKENS, "ignore_eos": True, "seed": 0,
    }  # fmt: skip
    try:
        left_s = max(1.0, deadline - time.monotonic())
        httpx.post(f"{server['url']}/v1/completions", json=body, timeout=left_s).raise_for_status()  # warm
        start = time.monotonic()
        answer = httpx.post(f"{server['url']}/v1/completions", json=body, timeout=left_s)
        seconds = time.monotonic() - start
        return int(answer.raise_for_status().json()["usage"]["completion_tokens"]) / seconds
    except httpx.HTTPError as error:
        raise WorkFailed(f"The served engine did not answer: {type(error).__name__}") from error
