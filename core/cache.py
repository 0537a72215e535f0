"""The user's cache directory: fetched models, built operator libraries, verified hashes, known engines."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/bitsmith`, or `~/.cache/bitsmith` (XDG Base Directory Specification)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "bitsmith"
