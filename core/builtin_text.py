"""The built-in text: what every Python carries, for when no other text is given and none can be fetched.

English from the language reference's help topics, and the standard library's source files. A document
belongs to one split by a hash of its name, so the calibration and evaluation parts never meet. It is a
fallback: the text says little about how a model is used.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from bitsmith.core.errors import Refused

Split = Literal["calibration", "evaluation"]

_SALT = "bitsmith built-in text 1"  # the fixed seed of the split
_SOURCE_CHARS = 1_000_000  # of source files per split, so that prose is not drowned
_MAX_PASSAGE_CHARS = 6000
_MIN_DOCUMENT_CHARS = 400
# Tests and tables of character sets are neither prose nor usual code.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
_SKIPPED_FOLDERS |= {"__pycache__", "pydoc_data", "turtledemo", "ensurepip", "config"}


@cache
def builtin_documents(split: Split) -> tuple[str, ...]:
    """Passages of at most 6000 characters, topics first, in an order that depends on names alone."""
    passages = [p for _, text in _of_split(_topics(), split) for p in _passages(text)]
    num_chars = 0
    for _, text in _of_split(_sources(), split):
        if num_chars >= _SOURCE_CHARS:
            break
        num_chars += len(text)
        passages.extend(_passages(text))
    if not passages:
        raise Refused("This Python has neither help topics nor source files; give a text file instead of builtin.")
    return tuple(dict.fromkeys(passages))


def _rank(name: str) -> bytes:
    return hashlib.sha256(f"{_SALT}:{name}".encode()).digest()


def _of_split(documents: Iterator[tuple[str, str]], split: Split) -> list[tuple[str, str]]:
    parity = 0 if split == "calibration" else 1
    ranked = sorted(((_rank(name), name, text) for name, text in documents), key=lambda entry: entry[0])
    return [(name, text) for rank, name, text in ranked if rank[0] % 2 == parity]


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name, text in topics.items():
        yield f"topic/{name}", text


def _sources() -> Iterator[tuple[str, str]]:
    root = Path(os.__file__).parent
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.parts[0].startswith("config-"):
            continue
        try:
            yield f"source/{relative.as_posix()}", path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def _passages(text: str) -> Iterator[str]:
    """The text cut at line ends; documents and remainders that are too short to teach anything are left out."""
    piece, size = [], 0
    for line in text.splitlines(keepends=True):
        if piece and size + len(line) > _MAX_PASSAGE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if size >= _MIN_DOCUMENT_CHARS:
        yield "".join(piece)
