"""A remembered hash is used only for the very bytes that it was taken of."""

import json
import os
from pathlib import Path

import pytest

from bitsmith.core import verified_hashes
from bitsmith.core.cache import cache_dir
from bitsmith.core.digest import sha256_bytes, sha256_file
from bitsmith.core.verified_hashes import HashCache


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose bytes were read. All files count as settled, for the test need not wait."""
    reads: list[Path] = []

    def counted(path: Path) -> str:
        reads.append(path)
        return sha256_file(path)

    monkeypatch.setattr(verified_hashes, "sha256_file", counted)
    monkeypatch.setattr(verified_hashes, "_SETTLED_NS", -(10**18))
    return reads


def hashed(path: Path) -> str:
    with HashCache() as cache:
        return cache.sha256(path)


def test_bytes_are_read_once(tmp_path: Path, num_reads: list[Path]) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert [hashed(path) for _ in range(3)] == [sha256_bytes(b"one")] * 3
    assert num_reads == [path]


def test_a_byte_changed_in_place_is_found_even_if_the_time_is_put_back(
    tmp_path: Path, num_reads: list[Path]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    before = path.stat()
    hashed(path)
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert hashed(path) == sha256_bytes(b"two")


def test_a_replaced_file_is_read_again(tmp_path: Path, num_reads: list[Path]) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    hashed(path)
    (tmp_path / "g").write_bytes(b"two")
    (tmp_path / "g").rename(path)
    assert hashed(path) == sha256_bytes(b"two")


def test_a_file_that_has_just_changed_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_hashes, "_SETTLED_NS", 10**18)
    path = tmp_path / "f"
    path.write_bytes(b"one")
    hashed(path)
    assert not list(cache_dir().glob("*.json"))


@pytest.mark.parametrize("content", ["", "nonsense", "[1]", '{"key": 3}'])
def test_a_damaged_cache_costs_time_only(
    content: str, tmp_path: Path, cache_home: Path, num_reads: list[Path]
) -> None:
    cache_home.mkdir(parents=True)
    (cache_home / "verified-hashes.json").write_text(content)
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert hashed(path) == sha256_bytes(b"one")
    assert hashed(path) == sha256_bytes(b"one")
    assert len(num_reads) == 1


def test_an_unwritable_cache_costs_time_only(
    tmp_path: Path, num_reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in-the-way").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "in-the-way"))
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert hashed(path) == hashed(path) == sha256_bytes(b"one")


def test_old_entries_make_room(
    tmp_path: Path, cache_home: Path, num_reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_hashes, "_MAX_ENTRIES", 3)
    for index in range(5):
        (tmp_path / str(index)).write_text(str(index))
        hashed(tmp_path / str(index))
    entries = json.loads((cache_home / "verified-hashes.json").read_text())
    assert sorted(entries.values()) == sorted(sha256_bytes(str(index).encode()) for index in (2, 3, 4))
