"""`bitsmith serve` over TensorRT-LLM's LLM API: real HTTP, the stock client, and a double of the library.

The double stands in for software that cannot be installed here; what is proven is our side of the calls.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bitsmith.compile.tensorrt_job import TensorrtJob, plan_tensorrt
from bitsmith.compile.tensorrt_llm_args import RunLimits
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.serve.engine_choice import LLM_API_COMMAND, engine_command
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings

DOUBLE = Path(__file__).parent / "tensorrt_double"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(str(path))
    for file in tokenizer_dir.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def make_artifact(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(target: str) -> Path:
        out = tmp_path_factory.mktemp("artifact") / "engine"
        job = TensorrtJob(
            model_dir,
            out,
            target,  # type: ignore[arg-type]
            kv_cache="bf16",
            limits=RunLimits(max_batch_size=4),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", "/usr/bin:/bin")
            compile_tensorrt(job, plan_tensorrt(job), Reporter(quiet=True))
        return out

    return make


@pytest.fixture
def built(make_artifact: Callable[[str], Path]) -> Path:
    """An engine artifact as it is after its build.sh."""
    artifact = make_artifact("tensorrt-llm")
    (artifact / "engine").mkdir()
    build = {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 32, "gather_generation_logits": False}
    config = {"version": "1.2.1", "pretrained_config": {}, "build_config": build}
    (artifact / "engine" / "config.json").write_text(json.dumps(config))
    (artifact / "engine" / "rank0.engine").write_bytes(b"engine")
    return artifact


class Served:
    """`bitsmith serve` as a process of its own, which finds the double."""

    def __init__(self, artifact: Path, *options: str) -> None:
        command = (sys.executable, "-m", "bitsmith.pipeline.main", "serve", str(artifact), "--port", "0")
        environment = os.environ | {"PYTHONPATH": str(DOUBLE)}
        self.process = subprocess.Popen(
            (*command, "--json", "--served-model-name", "m", *options),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        assert "url" in line, line
        self.url = json.loads(line)["url"]
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def running(self) -> str:
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("bitsmith_requests_running "))

    def stop(self) -> str:
        self.process.terminate()
        _, log = self.process.communicate(timeout=60)
        assert self.process.returncode in (0, -15), log
        return log


@pytest.fixture(scope="module")
def served(make_artifact: Callable[[str], Path]) -> Iterator[Served]:
    server = Served(make_artifact("tensorrt-llm-pytorch"))
    yield server
    log = server.stop()
    assert "quotes the prompt" not in log


def complete(served: Served, prompt: str | list[int] = "a", **options: Any) -> Any:
    return served.client.completions.create(model="m", prompt=prompt, **{"temperature": 0} | options)


def test_completion_is_the_engines(served: Served) -> None:
    answer = complete(served, max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcde", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 4)


def test_streamed_equals_whole(served: Served) -> None:
    parts = list(complete(served, max_tokens=5, stream=True))
    assert "".join(part.choices[0].text for part in parts) == "bcdef"
    assert len(parts) >= 5  # token by token, not at the end
    assert parts[-1].choices[0].finish_reason == "length"


def test_chat_streamed_and_whole(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    ask: Any = {"model": "m", "messages": messages, "temperature": 0, "max_completion_tokens": 3}
    whole = served.client.chat.completions.create(**ask)
    parts = list(served.client.chat.completions.create(stream=True, **ask))
    text = whole.choices[0].message.content
    assert len(text) > 0
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text


def test_stop_string_cuts_the_text_and_frees_the_engine(served: Served) -> None:
    answer = complete(served, max_tokens=20, stop=["ef"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcd", "stop")
    slow = complete(served, [1, 6], max_tokens=100, stop=[")"])  # ids 7, 8, ... are ( ) * ...
    assert slow.choices[0].finish_reason == "stop"
    for _ in range(100):
        if served.running().endswith(" 0"):
            return
        time.sleep(0.05)
    raise AssertionError(served.running())


def test_stop_token_ids_and_ends(served: Served, encode: Callable[[str], list[int]]) -> None:
    stop = encode("d")
    answer = complete(served, max_tokens=20, extra_body={"stop_token_ids": stop})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bc", "stop")
    # The id before <|end|> is "th": greedy generation runs into the end token.
    end = encode("<|end|>")[0]
    answer = complete(served, [end - 1], max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    ignored = complete(served, [end - 1], max_tokens=2, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length"


def test_seed_repeats_and_choices_differ(served: Served) -> None:
    ask: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": -7}
    first, second = (complete(served, n=2, **ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert texts[0] != texts[1]
    assert complete(served, **ask).choices[0].text == texts[0]
    assert complete(served, **ask | {"seed": 8}).choices[0].text != texts[0]


def test_logprobs_as_given(served: Served) -> None:
    logprobs = complete(served, max_tokens=2, logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["b", "c"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"b": -0.5, "c": -2.0}, {"c": -0.5, "d": -2.0}]
    chosen_only = complete(served, max_tokens=1, logprobs=0).choices[0].logprobs
    assert chosen_only.top_logprobs == [{"b": -0.5}]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("echo", {"echo": True}),
        ("logit_bias", {"logit_bias": {"5": 1.0}}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 1000}),
    ],
)
def test_what_cannot_be_honoured_is_refused(served: Served, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        complete(served, **options)
    assert caught.value.param == field


def test_a_failing_request_ends_alone(served: Served) -> None:
    with pytest.raises(openai.InternalServerError):
        complete(served, [1, 5])
    assert complete(served, max_tokens=1).choices[0].text == "b"


def test_built_engine_needs_trust_and_knows_its_limits(built: Path) -> None:
    settings = ServeSettings(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOUBLE))
        with pytest.raises(Refused, match="--trust-engine"):
            engine_command(settings)
        assert engine_command(ServeSettings(built, trust_engine=True)) == LLM_API_COMMAND
    server = Served(built, "--trust-engine")
    try:
        models = httpx.get(server.url + "/v1/models").json()["data"][0]
        assert models["max_model_len"] == 64
        assert "TensorRT-LLM 1.2.1 (tensorrt-llm)" in models["arithmetic"]
        assert complete(server, max_tokens=2).choices[0].text == "bc"
        with pytest.raises(openai.BadRequestError, match="gather_generation_logits"):
            complete(server, logprobs=1)
        with pytest.raises(openai.BadRequestError, match="at most 32"):
            complete(server, [1] * 40, max_tokens=1)
    finally:
        server.stop()


def test_another_release_is_refused(built: Path) -> None:
    path = built / "engine" / "config.json"
    path.write_text(path.read_text().replace("1.2.1", "1.1.0"))
    command = (
        sys.executable,
        "-m",
        "bitsmith.pipeline.main",
        "serve",
        str(built),
        "--trust-engine",
        "--port",
        "0",
    )
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(DOUBLE)}, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "1.1.0" in done.stderr and "1.2.1" in done.stderr


def test_without_tensorrt_llm_it_is_refused_before_work(
    make_artifact: Callable[[str], Path], built: Path
) -> None:
    pytorch, exported = make_artifact("tensorrt-llm-pytorch"), make_artifact("tensorrt-llm")
    with pytest.raises(Refused, match="tensorrt_llm is not installed") as caught:
        engine_command(ServeSettings(pytorch))
    assert f"bitsmith serve {pytorch}" in str(caught.value)
    assert f"{pytorch}/serve.sh" in str(caught.value)
    with pytest.raises(Refused, match="exported, not built"):
        engine_command(ServeSettings(exported))
    with pytest.raises(Refused, match="speculate, num_threads: of the native engine only"):
        engine_command(ServeSettings(pytorch, num_threads=2, runtime=RuntimeSettings(speculate="ngram")))
