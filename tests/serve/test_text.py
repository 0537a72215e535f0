"""Tokens to text: characters and stop strings that lie across tokens, however the tokens come."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.detokenizer import Detokenizer
from bitsmith.serve.request import TokenLogprob
from bitsmith.serve.scheduled_step import RequestProgress
from bitsmith.serve.stop_checker import StopChecker
from bitsmith.serve.text_collector import TextCollector, TextDelta
from bitsmith.serve.token_bytes import TokenBytes, load_vocabulary

Encode = Callable[[str | bytes], list[int]]


@pytest.fixture(scope="module")
def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    return TokenBytes(tokenizer)


def test_bytes_of_tokens(token_bytes: TokenBytes, tokenizer: PreTrainedTokenizerBase, encode: Encode) -> None:
    text = "the thé \u20ac \U0001f980\n\t"
    assert b"".join(token_bytes[i] for i in encode(text)) == text.encode()
    assert encode("th") == [256] and token_bytes[256] == b"th"
    end = 257
    assert tokenizer.convert_tokens_to_ids("<|end|>") == end
    assert token_bytes[end] == b"" and token_bytes.with_specials(end) == b"<|end|>"
    assert token_bytes[10**6] == b"" and token_bytes[-1] == b""
    assert token_bytes.special_ids_spelled(["x", "<|other|>"]) == (259,)
    assert token_bytes.num_token_ids == 260


def test_end_ids_are_the_union(
    tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = tmp_path_factory.mktemp("union")
    (engine / "tokenizer").mkdir()
    (engine / "config.json").write_text('{"text_config": {"eos_token_id": 3}}')
    (engine / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    vocabulary = load_vocabulary(tokenizer, token_bytes, engine / "tokenizer")
    assert vocabulary.end_token_ids == {3, 5, 7, 257}
    assert vocabulary.num_token_ids == 260


@pytest.mark.parametrize("text", ["\U0001f980", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "e\u0301\u20acx"])
def test_characters_over_several_tokens(token_bytes: TokenBytes, encode: Encode, text: str) -> None:
    detokenizer = Detokenizer(token_bytes)
    pieces = [detokenizer.feed([token_id]) for token_id in encode(text.encode())]
    assert "".join(pieces) == text and detokenizer.flush() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_in_mid_character(token_bytes: TokenBytes, encode: Encode) -> None:
    prompt = encode("say \u20ac".encode()[:-1])
    finished = Detokenizer(token_bytes, prompt)
    assert finished.feed(encode(b"\xac!")) == "\u20ac!"
    other = Detokenizer(token_bytes, prompt)
    assert other.feed(encode(b"no")) == "no", "the prompt's flaw is not the output's"
    nothing = Detokenizer(token_bytes, prompt)
    assert nothing.flush() == ""


def test_generation_that_ends_in_mid_character(token_bytes: TokenBytes, encode: Encode) -> None:
    detokenizer = Detokenizer(token_bytes)
    assert detokenizer.feed(encode(b"a\xe2\x82")) == "a"
    assert detokenizer.flush() == "\ufffd"


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=24), prompt=st.text(max_size=3))
def test_joined_pieces_are_the_plain_decoding(data: bytes, prompt: str) -> None:
    class Bytes(TokenBytes):
        def __init__(self) -> None:
            pass

        def __getitem__(self, token_id: int) -> bytes:
            return bytes([token_id])

    detokenizer = Detokenizer(Bytes(), list(prompt.encode()))
    joined = "".join(detokenizer.feed([byte]) for byte in data) + detokenizer.flush()
    assert joined == data.decode("utf-8", "replace")


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    points = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(points)]


def test_what_could_become_a_stop_is_held_and_nothing_else() -> None:
    checker = StopChecker(["</s>", "STOP"])
    assert [checker.feed(piece) for piece in ("ab<", "/", "x", "S", "T<", "/s", ">tail")] == [
        *("ab", "", "</x", "", "ST", "", ""),
    ]
    assert checker.is_stopped and checker.flush() == ""


def test_a_prefix_of_a_stop_is_flushed_at_the_end() -> None:
    checker = StopChecker(["abcabd"])
    assert checker.feed("xabcab") == "x"
    assert checker.feed("c") == "abc"
    assert checker.flush() == "abc"


def test_the_stop_that_is_complete_first_wins() -> None:
    for pieces in (["abcd"], ["ab", "cd"], list("abcd")):
        checker = StopChecker(["abcd", "c"])
        assert "".join(map(checker.feed, pieces)) == "ab"


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_stops_do_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    whole, cut = StopChecker(stops), StopChecker(stops)
    expected = whole.feed(text) + ("" if whole.is_stopped else whole.flush())
    shown = [cut.feed(piece) for piece in _pieces(text, [min(c, len(text)) for c in cuts])]
    joined = "".join(shown) + ("" if cut.is_stopped else cut.flush())
    assert joined == expected and cut.is_stopped == whole.is_stopped == any(stop in text for stop in stops)
    assert not any(stop in joined for stop in stops)
    if not cut.is_stopped:
        assert joined == text


def _collect(
    token_bytes: TokenBytes, tokens: list[int], params: SamplingParams, group: int
) -> tuple[list[TextDelta], TextCollector]:
    collector = TextCollector(token_bytes, [0], params)
    deltas = []
    for start in range(0, len(tokens), group):
        part = tuple(tokens[start : start + group])
        is_last = start + group >= len(tokens)
        progress = RequestProgress(
            "r", part, tuple(TokenLogprob(t, -1.0, ()) for t in part), (), "length" if is_last else None, 0
        )
        deltas.append(collector.feed(progress))
        if collector.finish_reason is not None:
            break
    return deltas, collector


@pytest.mark.parametrize("group", [1, 2, 5, 99])
def test_stop_in_the_middle_of_tokens_streamed_or_not(
    token_bytes: TokenBytes, encode: Encode, group: int
) -> None:
    tokens = encode("one \u20ac two the three")
    deltas, collector = _collect(token_bytes, tokens, SamplingParams(stop=("o th",)), group)
    assert "".join(delta.text for delta in deltas) == "one \u20ac tw"
    assert deltas[-1].finish_reason == "stop" and collector.is_stopped_by_text
    # usage counts the tokens that were read to find the stop: up to the one that holds its last letter
    assert collector.num_output_tokens == len(encode("one \u20ac two th"))
    texts = [token_bytes[p.entry.token_id] for delta in deltas for p in delta.logprobs]
    assert b"".join(texts).decode() == "one \u20ac tw"


def test_logprobs_stay_with_their_text_and_all_arrive(token_bytes: TokenBytes, encode: Encode) -> None:
    tokens = [*encode("a\u20acb"), 257]
    deltas, _ = _collect(token_bytes, tokens, SamplingParams(stop=("zz",)), 1)
    arrived = [(p.entry.token_id, p.text_offset) for delta in deltas for p in delta.logprobs]
    assert arrived == list(zip(tokens, [0, 1, 1, 1, 2, 3], strict=True))
    assert [len(delta.logprobs) for delta in deltas] == [1, 0, 0, 3, 1, 1]
