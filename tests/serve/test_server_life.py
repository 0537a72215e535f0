"""The server as those who run it meet it: clients that leave, overload, death, drain, keys, logs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from bitsmith.core.errors import Refused
from bitsmith.serve.engine_client import EngineClient
from bitsmith.serve.engine_setup import resolve_limits
from bitsmith.serve.readiness import Readiness, ReadinessProbe
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings
from bitsmith.serve.server import EngineServer

if TYPE_CHECKING:
    from tests.serve.conftest import RunningServer
    from tests.serve.fake_model import FakeModel

StartServer = Callable[..., "RunningServer"]
LONG: dict[str, Any] = {"model": "fake", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
FAKE_MODEL_FILE = Path(__file__).with_name("fake_model.py")


@pytest.fixture(scope="module")
def slow_server(start_server: StartServer) -> "RunningServer":
    """Two at once, four more may wait, 10 ms a step, 64 blocks."""
    runtime = RuntimeSettings(max_num_seqs=2, kv_cache_bytes=64 * 256)
    return start_server({"step_s": 0.01}, runtime=runtime, max_num_waiting=4).wait_ready()


def test_clients_that_leave_free_everything(slow_server: "RunningServer") -> None:
    """Streams dropped while running and while queued, and plain requests that are not waited for."""
    running = [server_stream(slow_server, "x" * 50 + str(index)) for index in range(2)]
    for stream in running:
        next(iter(stream))
    queued = [server_stream(slow_server, f"queued {index}") for index in range(2)]
    slow_server.wait_metric("requests_waiting", 2)
    for stream in queued:
        stream.close()
    slow_server.wait_metric("requests_waiting", 0)
    body = {"model": "fake", "prompt": "plain", "max_tokens": 400, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(slow_server.url + "/v1/completions", json=body, timeout=0.3)
    for stream in running:
        stream.close()
    slow_server.wait_metric("requests_running", 0)
    slow_server.wait_metric("requests_waiting", 0)
    slow_server.wait_metric("kv_blocks_free", 64)
    assert "Error" not in slow_server.log.getvalue() and "Traceback" not in slow_server.log.getvalue()
    # the next request is right, and the prefix of an aborted one is still known
    answer = slow_server.client().completions.create(model="fake", prompt="x" * 50 + "0", max_tokens=3)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 48


def server_stream(server: "RunningServer", prompt: str) -> Any:
    return server.client().completions.create(prompt=prompt, stream=True, **LONG)


def test_a_full_server_says_so_and_when_to_come_back(slow_server: "RunningServer") -> None:
    streams = [server_stream(slow_server, str(index)) for index in range(6)]
    slow_server.wait_metric("requests_waiting", 4)
    with pytest.raises(openai.RateLimitError) as refused:
        slow_server.client().completions.create(model="fake", prompt="one more", max_tokens=1)
    assert refused.value.code == "server_full"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert httpx.get(slow_server.url + "/health").status_code == 200
    for stream in streams:
        stream.close()
    slow_server.wait_metric("requests_running", 0)
    slow_server.client().completions.create(model="fake", prompt="one more", max_tokens=1)


def test_the_engine_dies_and_the_server_says_it(start_server: StartServer) -> None:
    server = start_server({"die_at_token": 259, "step_s": 0.01}).wait_ready()
    stream = server_stream(server, "goes on")
    next(iter(stream))
    with ThreadPoolExecutor(1) as threads:
        plain = threads.submit(lambda: server.client().completions.create(prompt="waits", **LONG))
        time.sleep(0.2)
        with pytest.raises(openai.InternalServerError, match="stopped working"):
            server.client().completions.create(model="fake", prompt="<|other|>", max_tokens=1)
        with pytest.raises(openai.InternalServerError, match="stopped working"):
            plain.result()
    with pytest.raises(openai.APIError, match="stopped working"):
        list(stream)
    health = httpx.get(server.url + "/health")
    assert (health.status_code, health.json()) == (503, {"status": "engine_dead"})
    assert httpx.get(server.url + "/health/live").status_code == 200
    with pytest.raises(openai.InternalServerError, match="stopped working") as refused:
        server.client().completions.create(model="fake", prompt="a")
    assert "retry-after" in refused.value.response.headers


def test_an_engine_that_is_refused_ends_the_server_with_its_words(
    start_server: StartServer,
) -> None:
    server = start_server({"refuse": "weights-1.safetensors does not match its SHA-256."})
    server.join()
    assert isinstance(server.error, Refused) and "weights-1" in str(server.error)


def test_limits_beyond_the_engine_are_refused(make_model: "Callable[..., FakeModel]") -> None:
    model = make_model()
    for settings, words in (
        (RuntimeSettings(max_num_seqs=99), "max_num_seqs is 99.*max_batch_size 8"),
        (RuntimeSettings(max_num_batched_tokens=65), "max_num_batched_tokens is 65.*max_num_tokens 64"),
        (RuntimeSettings(max_num_seqs=8, max_num_batched_tokens=7), "max_num_seqs 8"),
        (RuntimeSettings(kv_cache_bytes=255), "no room for one block of 256 bytes"),
        (RuntimeSettings(kv_cache_bytes=1 << 50), "are available"),
    ):
        with pytest.raises(Refused, match=words):
            resolve_limits(model, settings)
    limits = resolve_limits(model, RuntimeSettings(max_num_batched_tokens=5, kv_cache_bytes=256 * 10))
    assert (limits.max_num_seqs, limits.max_model_len, limits.num_kv_blocks) == (5, 160, 10)


def test_a_busy_port_is_refused_before_anything_is_loaded(server: "RunningServer") -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(Refused, match=f"port {port}"):
        EngineServer(ServeSettings(Path("nowhere"), port=port), None)  # type: ignore[arg-type]


SERVER_SCRIPT = """
import sys
from pathlib import Path
from bitsmith.core.progress import Reporter
from bitsmith.serve.serve_settings import ServeSettings
from bitsmith.serve.server import EngineServer
drain_timeout_s = float(sys.argv[3])
settings = ServeSettings(Path(sys.argv[1]), port=0, served_model_name="fake", drain_timeout_s=drain_timeout_s)
server = EngineServer(settings, Reporter(), (sys.executable, sys.argv[2]))
print(server.url, flush=True)
server.run()
"""


def _start_process(engine_dir: Path, drain_timeout_s: float) -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER_SCRIPT, str(engine_dir), str(FAKE_MODEL_FILE), str(drain_timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    for _ in range(1200):
        try:
            if httpx.get(url + "/health").status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("never ready")


def _children(process_id: int) -> list[int]:
    text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(child) for child in text.split()]


def _stream(url: str, num_tokens: int) -> Any:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    return iter(
        client.completions.create(
            model="fake", prompt="abc", max_tokens=num_tokens, stream=True, extra_body={"ignore_eos": True}
        )
    )


def test_sigterm_drains_and_the_deadline_cuts(make_engine_dir: Callable[..., Path]) -> None:
    process, url = _start_process(make_engine_dir(step_s=0.01), drain_timeout_s=4.0)
    short, long = _stream(url, 60), _stream(url, 490)
    first = next(short).choices[0].text
    next(long)
    process.send_signal(signal.SIGTERM)
    while httpx.get(url + "/health").status_code == 200:
        time.sleep(0.02)
    refused = httpx.post(url + "/v1/completions", json={"model": "fake", "prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    parts = list(short)
    assert parts[-1].choices[0].finish_reason == "length" and first is not None
    with pytest.raises(openai.APIError, match="shutting down"):
        list(long)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "1 requests were cut after 4 s" in log


def test_no_engine_process_outlives_a_killed_server(make_engine_dir: Callable[..., Path]) -> None:
    process, url = _start_process(make_engine_dir(step_s=0.01), drain_timeout_s=5.0)
    next(_stream(url, 490))
    (child,) = _children(process.pid)
    os.kill(child, signal.SIGTERM)
    assert httpx.get(url + "/health").status_code == 200, "the engine leaves signals to its parent"
    process.kill()
    process.wait()
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    raise AssertionError("the engine process is still there")


def test_prompts_are_in_no_log(slow_server: "RunningServer", capfd: pytest.CaptureFixture[str]) -> None:
    marker = "MARKER-7c1f"
    url = slow_server.url + "/v1/completions"
    for body in (
        json.dumps({"model": "fake", "prompt": marker, "max_tokens": 2}),
        json.dumps({"model": "fake", "prompt": marker * 200, "max_tokens": 2}),
        json.dumps({"model": "fake", "prompt": {marker: marker}}),
        json.dumps({"model": "fake", marker: marker}),
        '{"model": "fake", "prompt": "' + marker,
    ):
        httpx.post(url, content=body)
    httpx.post(
        slow_server.url + "/v1/chat/completions",
        json={"model": "fake", "messages": [{"role": "tool", "content": marker}]},
    )
    captured = capfd.readouterr()
    assert marker not in slow_server.log.getvalue() + captured.out + captured.err
    assert marker not in httpx.get(slow_server.url + "/metrics").text


def test_readiness_needs_news_from_the_engine() -> None:
    client = EngineClient(ServeSettings(Path("engine")))
    probe = ReadinessProbe(client, stall_timeout_s=60)
    states = [probe.state]
    probe.is_loaded = True
    states.append(probe.state)
    client._last_news -= 61
    states.append(probe.state)
    assert not probe.is_ready and "no progress" in probe.reason
    client.is_dead = True
    states.append(probe.state)
    assert states == [Readiness.LOADING, Readiness.READY, Readiness.STALLED, Readiness.ENGINE_DEAD]


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 70000), ("max_num_waiting", 0), ("drain_timeout_s", -1.0), ("stall_timeout_s", float("nan"))],
)
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        ServeSettings(Path("engine"), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("kv_cache_bytes", -1), ("speculate", "magic"), ("num_speculative_tokens", 17)],
)
def test_runtime_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        RuntimeSettings(**{field: value})


def test_an_unexpected_error_is_logged_by_kind_and_place_only(slow_server: "RunningServer") -> None:
    """In a plain answer a 500, in a stream an event; the words of the error go nowhere."""
    model = slow_server.server._api.model
    assert model is not None
    original = model.service._count_prompts

    def fail(generation: object) -> None:
        raise RuntimeError("MARKER-ab12")

    model.service._count_prompts = fail  # type: ignore[method-assign]
    try:
        body = {"model": "fake", "prompt": "a", "max_tokens": 2}
        plain = httpx.post(slow_server.url + "/v1/completions", json=body)
        streamed = httpx.post(slow_server.url + "/v1/completions", json=body | {"stream": True})
    finally:
        model.service._count_prompts = original  # type: ignore[method-assign]
    assert plain.status_code == 500 and "An error in the server" in streamed.text
    said = plain.text + streamed.text + slow_server.log.getvalue()
    assert "MARKER-ab12" not in said and "RuntimeError in " in slow_server.log.getvalue()
    slow_server.wait_metric("requests_running", 0)
