import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsmith.core.digest import canonical_json, content_digest, sha256_bytes, sha256_file, stage_key

FILES = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=5)


@given(FILES)
def test_content_digest_does_not_depend_on_order(files: dict[str, str]) -> None:
    assert content_digest(dict(reversed(files.items()))) == content_digest(files)


@given(FILES, FILES)
def test_content_digest_tells_different_contents_apart(one: dict[str, str], other: dict[str, str]) -> None:
    assert (content_digest(one) == content_digest(other)) == (one == other)


def test_stage_key_depends_on_each_part() -> None:
    base = stage_key(["p"], {"bits": 4}, {"torch": "2"})
    assert base == stage_key(["p"], {"bits": 4}, {"torch": "2"})
    others = [stage_key(["q"], {"bits": 4}, {"torch": "2"}), stage_key(["p"], {"bits": 8}, {"torch": "2"})]
    others.append(stage_key(["p"], {"bits": 4}, {"torch": "3"}))
    assert len({base, *others}) == 4


def test_canonical_json_is_one_string_for_one_value() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})


def test_a_file_of_several_chunks_hashes_as_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8193  # just above 2 MiB
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == sha256_bytes(data) == hashlib.sha256(data).hexdigest()
