"""Token ids -> text as they come. Byte-exact: joined pieces are the UTF-8 decoding of the joined bytes."""

import codecs
from collections.abc import Sequence

from bitsmith.serve.token_bytes import TokenBytes

_MAX_CHAR_BYTES = 4


class Detokenizer:
    """Text of the output of one request.

    A character may lie across tokens, also across the end of the prompt: bytes of an unfinished character
    wait until it is finished or turns out to be none (then U+FFFD, as in any decoding with replacement).
    Unfinished bytes at the end of the prompt help the first output bytes to form a character; where they do
    not, they are the prompt's own flaw and give no text here.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_tail = _unfinished_tail(
            b"".join(token_bytes[token_id] for token_id in prompt_token_ids[-_MAX_CHAR_BYTES:])
        )

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that is certain after these tokens."""
        data = b"".join(self._token_bytes[token_id] for token_id in token_ids)
        if data and self._prompt_tail:
            if _is_valid_start(self._prompt_tail + data[:1]):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an unfinished character at the very end comes to."""
        return self._decoder.decode(b"", final=True)


def _is_valid_start(data: bytes) -> bool:
    """Whether `data` is the beginning of valid UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _unfinished_tail(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    tail: bytes = decoder.getstate()[0]
    return tail
