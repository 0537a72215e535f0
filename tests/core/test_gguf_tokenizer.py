"""Tokenizers rebuilt from GGUF metadata: splitting rules, merges, special tokens."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bitsmith.core.errors import Refused
from bitsmith.core.gguf_tokenizer import TokenType, write_tokenizer
from bitsmith.core.tokenizer import adds_bos, load_tokenizer

NORMAL, CONTROL, USER, BYTE = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE
SPACE = "\u2581"


def byte_level(pre: str, merges: Sequence[str], **extra: Any) -> dict[str, Any]:
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.{key}": value for key, value in extra.items()}


def sentencepiece(pieces: Sequence[tuple[str, float, int]], **extra: Any) -> dict[str, Any]:
    first = [("<unk>", 0.0, TokenType.UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows = [*first, *[(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)], *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": [row[1] for row in rows],
        "tokenizer.ggml.token_type": [row[2] for row in rows],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.{key}": value for key, value in extra.items()}


def rebuilt(metadata: dict[str, Any], path: Path) -> PreTrainedTokenizerBase:
    write_tokenizer(metadata, path, max_length=2048)
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.model_max_length == 2048
    assert len(tokenizer) == len(metadata["tokenizer.ggml.tokens"])
    return tokenizer


def pieces_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return list(tokenizer.convert_ids_to_tokens(token_ids))


# "Ġ" is the byte-level spelling of a space. The merges let every rule show where it cuts.
MERGES = ["Ġ 1", "1 2", "Ġ Ġ", "a b"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # GPT-2 keeps the last space for the number; digits together.
        ("gpt-2", "ab  12", ["ab", "Ġ", "Ġ1", "2"]),
        # SmolLM cuts single digits off first, so that both spaces stand together.
        ("smollm", "ab  12", ["ab", "ĠĠ", "1", "2"]),
        ("smollm", "12", ["1", "2"]),
        # Qwen2: single digits, never joined with the space before.
        ("qwen2", "ab 12", ["ab", "Ġ", "1", "2"]),
        # Llama 3: up to three digits together.
        ("llama-bpe", "ab 12", ["ab", "Ġ", "12"]),
    ],
)
def test_each_splitting_rule_cuts_where_it_should(
    pre: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    assert pieces_of(rebuilt(byte_level(pre, MERGES), tmp_path), text) == expected


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return rebuilt(byte_level("smollm", MERGES), tmp_path_factory.mktemp("smollm"))


@given(st.text(max_size=40))
def test_text_comes_back(smollm: PreTrainedTokenizerBase, text: str) -> None:
    assert smollm.decode(smollm(text).input_ids, clean_up_tokenization_spaces=False) == text


def test_control_tokens_are_matched_whole_and_are_special(smollm: PreTrainedTokenizerBase) -> None:
    token_ids = smollm("<|start|>ab<|end|>").input_ids
    assert (token_ids[0], token_ids[-1], len(token_ids)) == (0, 1, 3)
    assert smollm.decode(token_ids, skip_special_tokens=True) == "ab"
    assert (smollm.bos_token, smollm.eos_token) == ("<|start|>", "<|end|>")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (byte_level("gpt-2", []), False),
        (byte_level("gpt-2", [], **{"ggml.add_bos_token": True}), True),
        (byte_level("llama-bpe", []), True),
        (byte_level("llama-bpe", [], **{"ggml.add_bos_token": False}), False),
        (sentencepiece([("a", -1.0, NORMAL)]), True),
        (sentencepiece([("a", -1.0, NORMAL)], **{"ggml.add_bos_token": False}), False),
    ],
)
def test_bos_is_added_as_the_file_says_or_by_convention(
    metadata: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    assert adds_bos(rebuilt(metadata, tmp_path)) == expected


def test_eos_is_added_only_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = rebuilt(byte_level("gpt-2", [], **{"ggml.add_eos_token": True}), tmp_path)
    assert tokenizer("a").input_ids[-1] == tokenizer.eos_token_id


PIECES = [(SPACE, -1.0, NORMAL), ("a", -2.0, NORMAL), ("b", -3.0, NORMAL), ("c", -4.0, NORMAL)]
PIECES += [("bc", -0.1, NORMAL), ("ab", -0.2, NORMAL), ("abc", -0.3, NORMAL), ("  ", -1000.0, USER)]


def test_sentencepiece_merges_the_best_scored_pair_first(tmp_path: Path) -> None:
    tokenizer = rebuilt(sentencepiece(PIECES, **{"ggml.add_space_prefix": False}), tmp_path)
    assert pieces_of(tokenizer, "abc") == ["abc"]  # by way of bc, which scores best
    assert pieces_of(tokenizer, "abab") == ["ab", "ab"]
    assert pieces_of(tokenizer, "a  b") == ["a", SPACE * 2, "b"]  # stored as real spaces, user-defined
    assert pieces_of(tokenizer, "é") == ["<0xC3>", "<0xA9>"]
    for text in ("abc  ab é東🙂", " a", "a "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_sentencepiece_puts_a_space_first_unless_told_not_to(tmp_path: Path) -> None:
    tokenizer = rebuilt(sentencepiece(PIECES), tmp_path)
    assert pieces_of(tokenizer, "ab") == [SPACE, "ab"]
    assert tokenizer.decode(tokenizer("ab c", add_special_tokens=False).input_ids) == "ab c"


@given(st.text(alphabet="abc ", min_size=1, max_size=12))
def test_sentencepiece_agrees_with_its_definition(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """Repeatedly merge the neighbouring pair whose result scores best; user-defined pieces first."""
    metadata = sentencepiece(PIECES, **{"ggml.add_space_prefix": False})
    path = tmp_path_factory.getbasetemp() / "spm-definition"
    path.mkdir(exist_ok=True)
    scores = {p.replace(" ", SPACE): (kind == USER, score) for p, score, kind in PIECES}
    pieces = list(text.replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    assert pieces_of(rebuilt(metadata, path), text) == pieces


def test_the_chat_template_is_kept(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = rebuilt(byte_level("gpt-2", [], chat_template=template), tmp_path)
    assert tokenizer.chat_template == template
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<|start|>hi<|end|>"
    )


@pytest.mark.parametrize("name", ["tokens", "token_type", "merges"])
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    metadata = byte_level("gpt-2", [])
    del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(Refused, match=f"no field tokenizer.ggml.{name}"):
        write_tokenizer(metadata, tmp_path, max_length=2048)
