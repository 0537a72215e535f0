"""The bytes of every token, and the vocabulary's limits, read once from a tokenizer.

Bytes, because a character may lie across tokens: text is made from them by the detokenizer. Knows the two
byte-exact families: byte-level BPE, and SentencePiece pieces with byte fallback.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bitsmith.core.errors import Refused
from bitsmith.serve.request import Vocabulary

_BYTE_PIECE = re.compile(r"^<0x([0-9A-F]{2})>$")
_WORD_START = "\u2581"  # SentencePiece's visible space


class TokenBytes:
    """token id -> bytes. Special tokens have no bytes unless asked for; unknown ids have none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        specials = set(tokenizer.all_special_ids)
        added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
        specials |= {i for i, token in added.items() if token.special}
        self.special_ids = frozenset(specials)
        vocab = tokenizer.get_vocab()
        self.num_token_ids = max(vocab.values()) + 1
        to_bytes = _byte_level_bytes if _is_byte_level(tokenizer) else _piece_bytes
        self._bytes = [b""] * self.num_token_ids
        for piece, token_id in vocab.items():
            self._bytes[token_id] = piece.encode() if token_id in added else to_bytes(piece)
        self._special_text = {i: self._bytes[i].decode("utf-8", "replace") for i in specials if i in added}

    def with_specials(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.num_token_ids else b""

    def __getitem__(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self.with_specials(token_id)

    def special_ids_spelled(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Ids of special tokens that are spelled exactly like one of the texts."""
        wanted = set(texts)
        return tuple(sorted(i for i, text in self._special_text.items() if text in wanted))


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str())["decoder"]
    text = json.dumps(decoder)
    if '"ByteLevel"' in text:
        return True
    if _WORD_START in json.dumps(decoder, ensure_ascii=False) or '"ByteFallback"' in text:
        return False
    raise Refused(
        f"The tokenizer's decoder {decoder and decoder.get('type')!r} is not one this server can stream "
        "byte-exactly; byte-level BPE and SentencePiece pieces are."
    )


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()


def _byte_level_bytes(piece: str) -> bytes:
    if all(char in _BYTE_OF_CHAR for char in piece):
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    return piece.encode()


def _piece_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.match(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(_WORD_START, " ").encode()


def load_vocabulary(tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes, path: Path) -> Vocabulary:
    """End ids are the union of what generation_config.json, config.json and the tokenizer name.

    path: the tokenizer's directory; an engine keeps the two configs there or one level up.
    """
    end_ids: set[int] = set()
    for directory in (path, path.parent):
        for name in ("generation_config.json", "config.json"):
            end_ids |= _end_ids(directory / name)
    if isinstance(tokenizer.eos_token_id, int):
        end_ids.add(tokenizer.eos_token_id)
    return Vocabulary(token_bytes.num_token_ids, frozenset(end_ids))


def _end_ids(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    config: dict[str, Any] = json.loads(path.read_bytes())
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    return {value} if isinstance(value, int) else {i for i in value or () if isinstance(i, int)}
