"""Every tensor of a weight file starts at a multiple of 64 bytes and comes back as it went in."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file

from bitsmith.compile.weight_files import (
    ALIGNMENT,
    WeightFilesWriter,
    map_weights,
    read_weights,
    write_aligned,
)
from bitsmith.core.errors import Refused

_SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=5)
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.uint8])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=_SHAPES, dtype=_DTYPES)
def test_weights_equal_those_written(tmp_path: Path, shapes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = {str(i): (torch.randn(shape) * 50).to(dtype) for i, shape in enumerate(shapes)}
    path = tmp_path / "weights-00001.safetensors"
    path.unlink(missing_ok=True)
    write_aligned(path, tensors)
    for loaded in (map_weights(tmp_path), read_weights(tmp_path)):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor)
            assert loaded[name].data_ptr() % ALIGNMENT == 0
    others = load_file(path)  # any reader of safetensors opens it
    assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())


def test_the_data_starts_at_a_multiple_of_64(tmp_path: Path) -> None:
    path = tmp_path / "weights-00001.safetensors"
    write_aligned(path, {"one": torch.zeros(3), "two": torch.ones(5)})
    raw = path.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    assert (8 + header_bytes) % ALIGNMENT == 0
    header = json.loads(raw[8 : 8 + header_bytes])
    assert [
        entry["data_offsets"][0] % ALIGNMENT for name, entry in header.items() if name in ("one", "two")
    ] == [0, 0]


def test_shards_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsmith.compile.weight_files._SHARD_BYTES", 100)
    writer = WeightFilesWriter(tmp_path)
    for name in "abc":
        writer.add({name: torch.full((20,), float(ord(name)))})
    writer.finish()
    writer.finish()  # nothing is left to write
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"weights-{i:05}.safetensors" for i in (1, 2)]
    assert {name: float(tensor[0]) for name, tensor in map_weights(tmp_path).items()} == {
        "a": 97,
        "b": 98,
        "c": 99,
    }


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights-00001.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(Refused, match="weights-00001"):
        map_weights(tmp_path)
