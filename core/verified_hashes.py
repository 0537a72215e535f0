"""SHA-256 of files, remembered by what the file system says of them, so that big files are read once.

A file is known by device, inode, size, and modification and change time in nanoseconds: a byte changed
in place changes the last two. Neither artifacts nor models are known here, only files.
"""

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

from filelock import FileLock

from bitsmith.core.cache import cache_dir
from bitsmith.core.digest import sha256_file
from bitsmith.core.manifest import Manifest, verify_files

# Time stamps advance with the kernel's clock tick (10 ms at most). A file that changed less than this
# long ago could change once more under the same stamps, so its hash is not remembered yet.
_SETTLED_NS = 100_000_000
_MAX_ENTRIES = 20_000


class HashCache:
    """Context manager: hashes asked for inside it are looked up, and the new ones saved at its end.

    A cache file that is damaged or cannot be written costs time, never correctness.
    """

    def __init__(self) -> None:
        self._path = cache_dir() / "verified-hashes.json"
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}

    def __enter__(self) -> "HashCache":
        self._known = _load(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._new:
            with contextlib.suppress(OSError):
                self._save()

    def sha256(self, path: Path) -> str:
        """Hex SHA-256 of the file's bytes as they are now."""
        key, changed_ns = _stat_key(path)
        known = self._known.get(key)
        if known is not None:
            return known
        started_ns = time.time_ns()
        digest = sha256_file(path)
        if _stat_key(path)[0] == key and changed_ns < started_ns - _SETTLED_NS:
            self._known[key] = self._new[key] = digest
        return digest

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._path.with_suffix(".lock")):
            entries = _load(self._path) | self._new
            kept = dict(list(entries.items())[-_MAX_ENTRIES:])
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".verified-hashes-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            Path(name).replace(self._path)


def verify_files_cached(directory: Path, manifest: Manifest) -> None:
    """`verify_files`, reading only those files whose hashes are not known yet."""
    with HashCache() as cache:
        verify_files(directory, manifest, hash_file=cache.sha256)


def _stat_key(path: Path) -> tuple[str, int]:
    stat = path.stat()
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    return key, max(stat.st_mtime_ns, stat.st_ctime_ns)


def _load(path: Path) -> dict[str, str]:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(body, dict):
        return {}
    return {key: value for key, value in body.items() if isinstance(value, str) and len(value) == 64}
