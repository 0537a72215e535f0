"""Text for calibration and evaluation, and the token windows that it is packed into.

Sources: the built-in text, a .jsonl or .txt file, a data set of the hub. Nothing is repeated to fill up:
what was asked and what was obtained are both recorded.
"""

import hashlib
import json
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from bitsmith.core.builtin_text import Split, builtin_documents
from bitsmith.core.errors import Refused
from bitsmith.core.tokenizer import adds_bos

BUILTIN = "builtin"
_HUB_SPLITS: Mapping[Split, str] = {"calibration": "train", "evaluation": "test"}
_BATCH_DOCUMENTS = 64
# Windows are chosen by the seed from a pool of this many times what is needed; text beyond is not tokenized.
_POOL_FACTOR = 8


@dataclass(frozen=True, slots=True)
class TextSource:
    """Documents of one split. is_fallback: built-in text, which terminal and report must say."""

    name: str
    is_fallback: bool
    documents: tuple[str, ...]
    provenance: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """token_ids: [num_obtained, seq_len] int64. packing: the rule, in words, for reports."""

    token_ids: torch.Tensor
    num_requested: int
    num_obtained: int
    source: TextSource
    packing: str


def load_text(source: str, split: Split) -> TextSource:
    """Documents of `builtin`, a .jsonl file, a .txt file, or `hf:DATASET[:CONFIG]`.

    A file has no splits: it is used whole for whichever it is given for. Raises Refused when it cannot be
    read or holds no text.
    """
    if source == BUILTIN:
        documents: Sequence[str] = builtin_documents(split)
        facts: dict[str, Any] = {"kind": "builtin", "python": platform.python_version(), "split": split}
    elif source.startswith("hf:"):
        documents = _hub_documents(source, split)
        facts = {"kind": "hf", "split": _HUB_SPLITS[split]}
    else:
        documents = _file_documents(source)
        facts = {"kind": "file", "split": "whole file"}
    kept = tuple(document for document in documents if document.strip())
    if not kept:
        raise Refused(f"The {split} set is empty: {source} holds no text.")
    facts |= {
        "source": source,
        "num_documents": len(kept),
        "num_empty_documents": len(documents) - len(kept),
        "num_chars": sum(map(len, kept)),
        "sha256": _digest(kept),
    }
    name = "built-in text" if source == BUILTIN else source
    return TextSource(name, source == BUILTIN, kept, facts)


def pack_windows(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, *, num_windows: int, seq_len: int, seed: int
) -> TokenWindows:
    """Up to `num_windows` windows that do not overlap, chosen by the seed.

    Documents in an order drawn from the seed are tokenized, each ended by EOS (BOS where there is no EOS),
    laid end to end and cut. Where the tokenizer adds BOS, every window begins with it, as the model expects
    of a context. Raises Refused when the text does not fill one window.
    """
    for field, value, least in (("num_windows", num_windows, 1), ("seq_len", seq_len, 2)):
        if value < least:
            raise Refused(f"{field} is {value}; it must be at least {least}.")
    leading = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    piece_len = seq_len - len(leading)
    stream = _token_stream(source, tokenizer, _POOL_FACTOR * num_windows * piece_len, seed)
    num_pieces = len(stream) // piece_len
    if num_pieces == 0:
        raise Refused(
            f"The {_set_name(source)} is empty: {source.name} comes to {len(stream)} tokens, less than one "
            f"window of {seq_len}. Give more text or a smaller seq_len."
        )
    pieces = torch.tensor(stream[: num_pieces * piece_len], dtype=torch.int64).reshape(num_pieces, piece_len)
    chosen = torch.randperm(num_pieces, generator=torch.Generator().manual_seed(seed))[:num_windows]
    first = torch.tensor(leading, dtype=torch.int64).expand(len(chosen), len(leading))
    token_ids = torch.cat([first, pieces[chosen]], dim=1).contiguous()
    return TokenWindows(token_ids, num_windows, len(chosen), source, _rule(tokenizer, bool(leading)))


def _token_stream(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, max_tokens: int, seed: int
) -> list[int]:
    order = list(range(len(source.documents)))
    random.Random(seed).shuffle(order)
    separator = _separator(tokenizer)
    stream: list[int] = []
    for start in range(0, len(order), _BATCH_DOCUMENTS):
        batch = [source.documents[index] for index in order[start : start + _BATCH_DOCUMENTS]]
        for token_ids in tokenizer(batch, add_special_tokens=False, verbose=False).input_ids:
            stream += [*token_ids, *separator]
        if len(stream) >= max_tokens:
            break
    return stream[:max_tokens]


def _separator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    return [next(i for i in ids if i is not None)] if any(i is not None for i in ids) else []


def _rule(tokenizer: PreTrainedTokenizerBase, has_leading_bos: bool) -> str:
    separator = _separator(tokenizer)
    if not separator:
        ended = "documents laid end to end"
    else:
        name = "EOS" if tokenizer.eos_token_id is not None else "BOS"
        ended = f"each document ended by {name} ({separator[0]})"
    return f"{ended}; each window begins with BOS" if has_leading_bos else ended


def _set_name(source: TextSource) -> str:
    split = source.provenance.get("split")
    return {"calibration": "calibration set", "evaluation": "evaluation set"}.get(str(split), "text")


def _file_documents(source: str) -> list[str]:
    path = Path(source).expanduser()
    if path.suffix not in (".jsonl", ".txt"):
        raise Refused(
            f"Text source {source!r} is not known: give {BUILTIN}, FILE.jsonl, FILE.txt or hf:DATASET."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refused(f"Text file {source} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise Refused(f"Text file {source} is not UTF-8: byte {error.start} is invalid.") from error
    if path.suffix == ".txt":
        return [text]
    # Not splitlines(): JSON strings may hold U+2028 and its kin, which end no line of the file.
    lines = text.split("\n")
    return [_json_text(line, f"{source}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]


def _json_text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise Refused(f"{where} is not valid JSON: {error}.") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        found = f"fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise Refused(f"{where} has no string field `text`; found {found}. Chat `messages` are not read.")
    text: str = record["text"]
    return text


def _hub_documents(source: str, split: Split) -> list[str]:
    import datasets

    name, _, config = source.removeprefix("hf:").partition(":")
    wanted = _HUB_SPLITS[split]
    try:
        data = datasets.load_dataset(name, config or None, split=wanted)
    except Exception as error:  # the library raises its own, its file systems' and its network's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Refused(
            f"Data set {source}, split {wanted!r} for {split}, could not be loaded: {reason}"
        ) from error
    if "text" not in data.column_names:
        raise Refused(f"Data set {source} has no column `text`; it has {', '.join(data.column_names)}.")
    return [str(text) for text in data["text"]]


def _digest(documents: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        data = document.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
