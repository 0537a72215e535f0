"""One BOS, and joins that leave no continuation empty."""

from transformers import PreTrainedTokenizerFast

from bitsmith.evaluate.encoding import TextEncoder


def test_exactly_one_bos(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = TextEncoder(bos_tokenizer)
    bos = bos_tokenizer.bos_token_id
    assert encoder.adds_bos
    assert encoder.encode("river stone").count(bos) == 1  # the tokenizer adds it
    assert encoder.encode("<s>river stone").count(bos) == 1  # a template wrote it
    assert encoder.encode("river stone", add_special_tokens=False).count(bos) == 0


def test_none_is_added_where_the_tokenizer_adds_none(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = TextEncoder(tokenizer)
    assert not encoder.adds_bos
    assert encoder.encode("river stone").count(tokenizer.bos_token_id) == 0
    assert encoder.encode("<s>river stone").count(tokenizer.bos_token_id) == 1  # what a text brings stays


def test_what_only_looks_like_bos_is_kept(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = TextEncoder(bos_tokenizer)
    for text in ("<s river", "< s>river", "<sriver>"):
        ids = encoder.encode(text)
        assert ids[0] == bos_tokenizer.bos_token_id
        assert bos_tokenizer.decode(ids[1:]) == text


def test_pairs_join_to_the_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = TextEncoder(tokenizer)
    context, continuation = encoder.encode_pair("the garden ", "river")
    assert context + continuation == encoder.encode("the garden river")
    assert tokenizer.decode(continuation) == " river"


class _Swallowing(TextEncoder):
    """As if the last characters of the context and the continuation were one token."""

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return [1, 2] if text in ("ab", "abc") else [3]


def test_a_swallowed_continuation_is_encoded_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert _Swallowing(tokenizer).encode_pair("ab", "c") == ([1, 2], [3])


def test_an_empty_context_becomes_the_prefix_token(tokenizer: PreTrainedTokenizerFast) -> None:
    pair = TextEncoder(tokenizer).continuation("", "river")
    assert pair.context == (tokenizer.bos_token_id,)
    assert tokenizer.decode(list(pair.continuation)) == "river"
