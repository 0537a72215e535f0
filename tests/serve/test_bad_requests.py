"""Hostile and mistaken requests: each is refused at the door, by the name of its field."""

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.serve.conftest import RunningServer

MESSAGES: Any = [{"role": "user", "content": "hello there"}]


def post(server: "RunningServer", route: str, body: Any, **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}/v1/{route}", content=content, timeout=30, **more)


DEEP = b"[" * 10_000 + b"]" * 10_000
BAD_BODIES: list[tuple[str, Any]] = [
    ("logit_bias", {"prompt": "a", "logit_bias": {"260": 1}}),
    ("logit_bias", {"prompt": "a", "logit_bias": {"abc": 1}}),
    ("logit_bias", {"prompt": "a", "logit_bias": {"1": 101}}),
    ("logit_bias", {"prompt": "a", "logit_bias": {"1": 1, "01": 2}}),
    ("n", {"prompt": "a", "n": 1_000_000}),
    ("n", {"prompt": ["a"] * 100, "n": 2}),
    ("n", {"prompt": "a", "n": 0}),
    ("n", {"prompt": "a", "n": "2"}),
    ("max_tokens", {"prompt": "a", "max_tokens": 10**9}),
    ("max_tokens", {"prompt": "a", "max_tokens": -1}),
    ("max_tokens", {"prompt": "a", "max_tokens": 0}),
    ("max_tokens", {"prompt": "a", "max_tokens": 2**70}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [1, 260]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [2**70]}),
    ("body", {"prompt": "\ud800"}),
    ("prompt", {}),
    ("top_k", {"prompt": "a", "top_k": -5}),
    ("top_p", {"prompt": "a", "top_p": 0}),
    ("min_p", {"prompt": "a", "min_p": 2}),
    ("seed", {"prompt": "a", "seed": 2**70}),
    ("temperature", {"prompt": "a", "temperature": float("nan")}),
    ("temperature", {"prompt": "a", "temperature": float("inf")}),
    ("temperature", {"prompt": "a", "temperature": -0.1}),
    ("temperature", {"prompt": "a", "temperature": True}),
    ("presence_penalty", {"prompt": "a", "presence_penalty": 3}),
    ("stop", {"prompt": "a", "stop": ["x"] * 1000}),
    ("stop", {"prompt": "a", "stop": [""]}),
    ("stop_token_ids", {"prompt": "a", "stop_token_ids": [260]}),
    ("logprobs", {"prompt": "a", "logprobs": 21}),
    ("best_of", {"prompt": "a", "best_of": 3}),
    ("stream_options", {"prompt": "a", "stream_options": {"include_usage": True}}),
    ("stream_options", {"prompt": "a", "stream": True, "stream_options": {"other": 1}}),
    ("repetition_penalty", {"prompt": "a", "repetition_penalty": 1.1}),
    ("store", {"prompt": "a", "store": True}),
    ("body", DEEP),
    ("prompt", b'{"model": "fake", "prompt": ' + DEEP[:90] + b"1" + DEEP[-90:] + b"}"),
    ("body", b"{"),
    ("body", b"\xff\xfe"),
    ("body", b"[1]"),
    ("model", b'{"prompt": "a"}'),
]


@pytest.mark.parametrize(("field", "body"), BAD_BODIES)
def test_hostile_completions_are_refused_by_field(server: "RunningServer", field: str, body: Any) -> None:
    answer = post(server, "completions", {"model": "fake"} | body if isinstance(body, dict) else body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert field in (error["param"], error["message"].partition(":")[0]), error


CHAT: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function"}]}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 5}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("max_completion_tokens", {"max_completion_tokens": 10**9}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("echo", {"echo": True}),
]


@pytest.mark.parametrize(("field", "body"), BAD_CHATS)
def test_hostile_chats_are_refused_by_field(
    server: "RunningServer", field: str, body: dict[str, Any]
) -> None:
    answer = post(server, "chat/completions", CHAT | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error


def test_unknown_fields_list_the_valid_ones(server: "RunningServer") -> None:
    message = post(server, "completions", {"model": "fake", "prompt": "a", "topk": 1}).json()["error"][
        "message"
    ]
    assert message.startswith("topk: unknown field.") and "top_k" in message and "echo" in message


def test_harmless_fields_and_nulls_are_accepted(server: "RunningServer") -> None:
    extra = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "stop": None,
        "max_tokens": 2,
        "tools": None,
    }
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "user", "content": parts}]
    body = CHAT | extra | {"response_format": {"type": "text"}, "messages": messages}
    assert post(server, "chat/completions", body).status_code == 200


def test_errors_outside_the_bodies(server: "RunningServer") -> None:
    assert (
        post(server, "completions", {"model": "gpt", "prompt": "a"}).json()["error"]["code"]
        == "model_not_found"
    )
    large = post(server, "completions", b" " * (server.settings.max_body_bytes + 1))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
    chunks = (b" " * 65536 for _ in range(80))
    assert httpx.post(f"{server.url}/v1/completions", content=chunks).status_code == 413
    missing = httpx.get(server.url + "/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "Not Found.")
    assert httpx.get(server.url + "/v1/completions").status_code == 405
