"""Engines that this user built on this machine: an engine is machine code, so only these load unasked.

The list is a file in the user's cache that only the user can write. An entry is the engine's content digest
and the machine; a copied engine keeps its digest, a changed one does not.
"""

import json
import os
import platform
import stat
from pathlib import Path

from filelock import FileLock

from bitsmith.core.cache import cache_dir
from bitsmith.core.digest import sha256_bytes
from bitsmith.core.errors import Refused

_LIST_NAME = "trusted-engines.json"


def record_engine(content_digest: str) -> None:
    """Add an engine that was just built here."""
    path = cache_dir() / _LIST_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        entries = _read(path)
        entries.setdefault(_machine(), [])
        if content_digest not in entries[_machine()]:
            entries[_machine()].append(content_digest)
        partial = path.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=1)
        partial.replace(path)


def require_trusted(engine_path: Path, content_digest: str) -> None:
    """Raises Refused unless this user built the engine on this machine."""
    if content_digest not in _read(cache_dir() / _LIST_NAME).get(_machine(), []):
        raise Refused(
            f"{engine_path} was not built by you on this machine, and an engine is machine code that runs "
            "with your rights. Compile it here from its checkpoint, or load it with --trust-engine if you "
            "trust where it came from."
        )


def _read(path: Path) -> dict[str, list[str]]:
    """The list; empty if there is none, or if someone else could have written it."""
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return {}
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(body, dict):
        return {}
    return {machine: digests for machine, digests in body.items() if isinstance(digests, list)}


def _machine() -> str:
    """Identifies this machine without revealing its name."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if path.is_file() and (identity := path.read_text(encoding="utf-8").strip()):
            return sha256_bytes(f"bitsmith {identity}".encode())
    return sha256_bytes(f"bitsmith {platform.node()}".encode())
