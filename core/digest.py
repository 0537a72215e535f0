"""SHA-256 of files and of canonical JSON, and the two identifiers of an artifact."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8, no NaN: one byte string for one value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def content_digest(files: Mapping[str, str]) -> str:
    """Digest of an artifact's payload: SHA-256 over the sorted (path, SHA-256) pairs.

    Neither time nor machine enters, so equal payloads have equal digests.
    """
    return sha256_bytes(canonical_json(sorted(files.items())))


def stage_key(parents: Sequence[str], config: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Key by which finished work is found again: parents' content digests, configuration, versions."""
    return sha256_bytes(canonical_json([sorted(parents), config, versions]))
