"""The built-in text: what every Python carries, for when no other text is given and none can be fetched.

English from the language reference's help topics, and the standard library's source files. A document
belongs to one split by a hash of its name. Help topics quote each other at length, so a paragraph that
was seen before is left out wherever it comes again: the splits share no paragraph. It is a fallback: the
text says little about how a model is used.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from bitsmith.core.errors import Refused

Split = Literal["calibration", "evaluation"]

MIN_PARAGRAPH_CHARS = 60  # shorter ones (`else:`, headings) may be anywhere

_SALT = "bitsmith built-in text 1"  # the fixed seed of the split
_SOURCE_CHARS = 1_000_000  # of source files per split, so that prose is not drowned
_MAX_PASSAGE_CHARS = 6000
_MIN_PASSAGE_CHARS = 400
# Tests and tables of character sets are neither prose nor usual code.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "ensurepip"}
_SKIPPED_FOLDERS |= {"test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo"}


def builtin_documents(split: Split) -> tuple[str, ...]:
    """Passages of at most 6000 characters, topics first, in an order that depends on names alone."""
    passages = _both_splits()[split]
    if not passages:
        raise Refused(
            "This Python has neither help topics nor source files; give a text file instead of builtin."
        )
    return passages


@cache
def _both_splits() -> dict[Split, tuple[str, ...]]:
    topics, sources = _topics(), _source_paths()
    seen: set[str] = set()
    result: dict[Split, tuple[str, ...]] = {}
    splits: tuple[tuple[Split, int], ...] = (("calibration", 0), ("evaluation", 1))
    for split, parity in splits:
        passages: list[str] = []
        for name in _names_of(parity, topics):
            passages += _passages(_unseen(topics[name], seen))
        num_chars = 0
        for name in _names_of(parity, sources):
            if num_chars >= _SOURCE_CHARS:
                break
            fresh = _unseen(_read(sources[name]), seen)
            num_chars += len(fresh)
            passages += _passages(fresh)
        result[split] = tuple(passages)
    return result


def _names_of(parity: int, documents: dict[str, str] | dict[str, Path]) -> list[str]:
    """Names of one split, in the order of their hashes."""
    ranked = sorted((hashlib.sha256(f"{_SALT}:{name}".encode()).digest(), name) for name in documents)
    return [name for rank, name in ranked if rank[0] % 2 == parity]


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {f"topic/{name}": text for name, text in topics.items()}


def _source_paths() -> dict[str, Path]:
    root = Path(os.__file__).parent
    found: dict[str, Path] = {}
    for folder, subfolders, files in os.walk(root):
        kept = (
            name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        )
        subfolders[:] = sorted(kept)
        # _sysconfigdata is one big literal of the building machine's paths.
        names = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        paths = [Path(folder) / name for name in names]
        found.update({f"source/{path.relative_to(root).as_posix()}": path for path in paths})
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _unseen(text: str, seen: set[str]) -> str:
    """The text without the long paragraphs that are in `seen`; those of this text are put there."""
    kept: list[str] = []
    for paragraph in text.split("\n\n"):
        key = paragraph.strip()
        if len(key) >= MIN_PARAGRAPH_CHARS:
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def _passages(text: str) -> Iterator[str]:
    """The text cut at line ends; documents and remainders too short to teach anything are left out."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if piece and size + len(line) > _MAX_PASSAGE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if size >= _MIN_PASSAGE_CHARS:
        yield "".join(piece)
