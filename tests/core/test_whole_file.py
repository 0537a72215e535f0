"""A file that appears whole, or not at all."""

from pathlib import Path

import pytest

from bitsmith.core.whole_file import whole_file


def test_it_appears_when_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_text("older")
    with whole_file(path) as partial:
        partial.write_text("new")
        assert partial.suffixes[-2:] == [".json", ".gz"]
        assert path.read_text() == "older"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("older")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as partial:
        partial.write_text("ha")
        raise KeyboardInterrupt
    assert path.read_text() == "older"
