"""A cache of its own for every test, and the small things that many tests need."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bitsmith.core.progress import Reporter

TokenizerMaker = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("cache-home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "bitsmith"


@pytest.fixture
def spoken() -> io.StringIO:
    """What the reporter said."""
    return io.StringIO()


@pytest.fixture
def reporter(spoken: io.StringIO) -> Reporter:
    return Reporter(Console(file=spoken, width=1000, highlight=False))


@pytest.fixture
def make_tokenizer() -> TokenizerMaker:
    """Byte tokenizer: a token per byte, then <bos> 256 and <eos> 257 if wanted."""

    def make(
        *, adds_bos: bool = False, has_eos: bool = True, template: str | None = None
    ) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {character: index for index, character in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<bos>", "<eos>"])
        if adds_bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", 256)]
            )
        ends = {"eos_token": "<eos>"} if has_eos else {}
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer, bos_token="<bos>", chat_template=template, **ends
        )

    return make
