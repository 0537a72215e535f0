"""Fixtures of the serving tests: a deterministic model, a byte-level tokenizer, requests."""

import importlib.util
import io
import itertools
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bitsmith.core.progress import Reporter
from bitsmith.core.sampling import SamplingParams
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.serve.request import Request, Vocabulary
from bitsmith.serve.serve_settings import RuntimeSettings, ServeSettings
from bitsmith.serve.server import EngineServer

if TYPE_CHECKING:
    from tests.serve.fake_model import FakeModel

FAKE_MODEL_FILE = Path(__file__).with_name("fake_model.py")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tool messages are not known here') }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fake_model_class() -> "type[FakeModel]":
    spec = importlib.util.spec_from_file_location("bitsmith_tests_fake_model", FAKE_MODEL_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model_class: type[FakeModel] = module.FakeModel
    return model_class


@pytest.fixture
def make_model(fake_model_class: "type[FakeModel]") -> "Callable[..., FakeModel]":
    return fake_model_class


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """make_request(prompt, max_tokens=..., seed=..., wants_prompt_logprobs=..., **sampling parameters)."""
    numbers = itertools.count()

    def make(
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        seed: int = 0,
        wants_prompt_logprobs: bool = False,
        vocabulary: Vocabulary = Vocabulary(300, frozenset()),  # noqa: B008 - frozen
        **sampling: Any,
    ) -> Request:
        return Request(
            request_id=f"r{next(numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            vocabulary=vocabulary,
            max_output_tokens=max_tokens,
            seed=seed,
            wants_prompt_logprobs=wants_prompt_logprobs,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level: id = rank of the byte's character, one merge (th), then <|end|>, <|start|>, <|other|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab["th"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|end|>", "<|start|>", "<|other|>")]
    )
    make_tokenizer: Any = PreTrainedTokenizerFast
    tokenizer = make_tokenizer(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    path = tmp_path_factory.mktemp("engine") / "tokenizer"
    tokenizer.save_pretrained(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def encode(tokenizer: PreTrainedTokenizerBase) -> Callable[[str | bytes], list[int]]:
    """Ids of a text, or of raw bytes one by one."""

    def encode_one(text: str | bytes) -> list[int]:
        if isinstance(text, str):
            ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
            return ids
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        chars = {byte: chr(byte) for byte in printable}
        chars |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
        return [alphabet.index(chars[byte]) for byte in text]

    return encode_one


class RunningServer:
    """A real server: HTTP in a thread of this process, the fake engine in a child process."""

    def __init__(self, engine_dir: Path, log: io.StringIO, **settings: Any) -> None:
        self.log = log
        reporter = Reporter(Console(file=log, width=200))
        self.settings = ServeSettings(engine_path=engine_dir, port=0, served_model_name="fake", **settings)
        self.server = EngineServer(self.settings, reporter, (sys.executable, str(FAKE_MODEL_FILE)))
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.error = error

    @property
    def url(self) -> str:
        return self.server.url

    def wait_ready(self) -> "RunningServer":
        while not self.server.is_ready.wait(0.1):
            assert self._thread.is_alive(), self.error or self.log.getvalue()
        return self

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0)

    def metric(self, name: str) -> float:
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(f"bitsmith_{name} "):
                return float(line.split()[1])
        raise AssertionError(name)

    def wait_metric(self, name: str, value: float) -> None:
        """The engine's numbers come with its answers to pings, every two seconds at the latest."""
        for _ in range(400):
            if self.metric(name) == value:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.server.stop()
        self.join()


@pytest.fixture(scope="session")
def make_engine_dir(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_engine_dir(**fields of FakeModel) -> a directory that fake_model.py loads as an engine."""

    def make(**config: Any) -> Path:
        path = tmp_path_factory.mktemp("fake-engine")
        shutil.copytree(tokenizer_dir, path / "tokenizer")
        (path / "fake.json").write_text(json.dumps(config))
        return path

    return make


@pytest.fixture(scope="session")
def start_server(make_engine_dir: Callable[..., Path]) -> Iterator[Callable[..., RunningServer]]:
    """start_server(engine={...}, **ServeSettings) -> RunningServer; all are stopped at the end."""
    servers: list[RunningServer] = []

    def start(engine: dict[str, Any] | None = None, **settings: Any) -> RunningServer:
        directory = make_engine_dir(**(engine or {}))
        servers.append(RunningServer(directory, io.StringIO(), **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """100 blocks, 8 requests at once, 64 tokens a step, speculation on."""
    runtime = RuntimeSettings(kv_cache_bytes=100 * 16 * 16, speculate="ngram")
    return start_server({"cycle_strength": 3.0}, runtime=runtime).wait_ready()
