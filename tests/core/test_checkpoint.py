"""What a checkpoint reader reads, and all that it refuses before it reads anything."""

import io
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.checkpoint_writer import INDEX_NAME, CheckpointWriter
from bitsmith.core.errors import Refused

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([[7]], dtype=torch.int32),
    "d": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def write(path: Path, *, max_shard_bytes: int = 1 << 30) -> None:
    writer = CheckpointWriter(path, max_shard_bytes=max_shard_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.finish()


def edit_index(path: Path, tensor: str, file: object) -> None:
    index = json.loads((path / INDEX_NAME).read_text())
    index["weight_map"][tensor] = file
    (path / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(("max_shard_bytes", "num_shards"), [(1 << 30, 1), (28, 2), (1, 4)])
def test_tensors_come_back_exactly_whatever_the_shards(
    max_shard_bytes: int, num_shards: int, model: Path
) -> None:
    write(model, max_shard_bytes=max_shard_bytes)
    assert len(list(model.glob("*.safetensors"))) == num_shards
    assert (model / INDEX_NAME).exists() == (num_shards > 1)
    reader = CheckpointReader(model)
    assert reader.config == {"model_type": "llama"}
    assert sorted(reader.names) == sorted(reader) == list("abcd")
    assert "a" in reader and "z" not in reader
    for name, tensor in TENSORS.items():
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(reader.tensor(name).to(torch.float64), tensor.to(torch.float64))


def test_an_unknown_tensor_is_named(model: Path) -> None:
    write(model)
    with pytest.raises(Refused, match=r"no tensor 'lm_head\.weight'"):
        CheckpointReader(model).tensor("lm_head.weight")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_checkpoint_of_pickles_is_refused_by_name(name: str, model: Path) -> None:
    torch.save({"a": torch.zeros(1)}, model / name)
    with pytest.raises(Refused, match=f"only as pickle \\({name}\\)"):
        CheckpointReader(model)


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_pickle_named_safetensors_is_refused(is_legacy: bool, model: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1)}, buffer, _use_new_zipfile_serialization=not is_legacy)
    (model / "model.safetensors").write_bytes(buffer.getvalue())
    with pytest.raises(Refused, match=r"model\.safetensors is named \.safetensors but holds a pickle"):
        CheckpointReader(model)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 64, struct.pack("<Q", 2) + b"{}extra"])
def test_other_files_named_safetensors_are_refused(data: bytes, model: Path) -> None:
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(Refused, match="not a readable safetensors file"):
        CheckpointReader(model)


def test_an_unknown_dtype_is_named_with_its_tensor(model: Path) -> None:
    header = json.dumps({"odd": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(Refused, match="tensor 'odd' has dtype F8_E8M0; known are F64"):
        CheckpointReader(model)


def test_missing_shards_are_named(model: Path) -> None:
    write(model, max_shard_bytes=1)
    (model / "model-00002-of-00004.safetensors").unlink()
    (model / "model-00004-of-00004.safetensors").unlink()
    with pytest.raises(Refused, match=r"lacks 2 of 4 shards: model-00002-of-00004\..*model-00004-of-00004"):
        CheckpointReader(model)


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "/outside.safetensors", "x/../../outside.safetensors"]
)
def test_an_index_that_leads_out_is_refused(place: str, model: Path) -> None:
    write(model, max_shard_bytes=1)
    save_file({"a": torch.zeros(1)}, model.parent / "outside.safetensors")
    edit_index(model, "a", place)
    with pytest.raises(Refused, match="not a plain path inside"):
        CheckpointReader(model)


@pytest.mark.parametrize("place", ["pytorch_model.bin", 3, None])
def test_an_index_that_names_no_safetensors_is_refused(place: object, model: Path) -> None:
    write(model, max_shard_bytes=1)
    edit_index(model, "a", place)
    with pytest.raises(Refused, match="places 'a' in"):
        CheckpointReader(model)


def test_a_tensor_that_its_shard_does_not_hold_is_named(model: Path) -> None:
    write(model, max_shard_bytes=1)
    edit_index(model, "ghost", "model-00001-of-00004.safetensors")
    with pytest.raises(Refused, match="places in it: ghost"):
        CheckpointReader(model)


def test_a_tensor_stored_twice_is_refused(model: Path) -> None:
    write(model, max_shard_bytes=1)
    save_file({"b": torch.zeros(1), "a": torch.zeros(1)}, model / "model-00002-of-00004.safetensors")
    with pytest.raises(Refused, match="'a' is stored a second time"):
        CheckpointReader(model)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_directory_is_refused(name: str, model: Path) -> None:
    write(model)
    (model / name).rename(model.parent / name)
    (model / name).symlink_to(model.parent / name)
    with pytest.raises(Refused, match=f"{name} is a symbolic link out of its directory"):
        CheckpointReader(model)


def test_the_hub_cache_keeps_its_links_to_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "config.json").write_text("{}")
    write(snapshot)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert torch.equal(CheckpointReader(snapshot).tensor("a"), TENSORS["a"])


@pytest.mark.parametrize(("text", "said"), [("{", "not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_config_is_refused(text: str, said: str, model: Path) -> None:
    write(model)
    (model / "config.json").write_text(text)
    with pytest.raises(Refused, match=said):
        CheckpointReader(model)


def test_directories_without_config_or_weights_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no config\.json"):
        CheckpointReader(tmp_path)
    with pytest.raises(Refused, match=r"neither model\.safetensors nor"):
        CheckpointReader(model)
