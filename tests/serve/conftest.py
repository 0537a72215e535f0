"""Fixtures of the serving tests: a deterministic model, a byte-level tokenizer, requests."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.request import Request, Vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

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
    """Byte-level: id = rank of the byte's character (no merges but one), then <|end|>, <|start|>, <|other|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab["th"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|end|>", "<|start|>", "<|other|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    path = tmp_path_factory.mktemp("engine") / "tokenizer"
    tokenizer.save_pretrained(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    from bitsmith.core.tokenizer import load_tokenizer

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
