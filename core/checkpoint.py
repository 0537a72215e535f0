"""Read a Hugging Face model directory: config and safetensors, one tensor at a time, memory-mapped.

Knows nothing of quantization. Pickled weights, paths and links that lead out of the directory, missing
shards and unknown dtypes are refused when the reader is made, before any tensor is read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bitsmith.core.checkpoint_writer import INDEX_NAME, SINGLE_NAME
from bitsmith.core.errors import Refused
from bitsmith.core.model_files import resolve_inside

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ZIP_MAGIC = b"PK\x03\x04"

# The names that safetensors gives to dtypes in its headers.
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointReader:
    """Tensors of a model directory by name. Shards stay mapped while the reader lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json_object(path, "config.json")
        self._tensors: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]] = {}
        for shard, expected in _shards(path):
            self._open(shard, expected)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[2]

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name)[1]

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._find(name)[0].get_tensor(name)
        return tensor

    def _find(self, name: str) -> tuple[Any, torch.dtype, tuple[int, ...]]:
        found = self._tensors.get(name)
        if found is None:
            raise Refused(f"{self.path} has no tensor {name!r}; it has {len(self._tensors)} others.")
        return found

    def _open(self, shard: Path, expected: set[str] | None) -> None:
        handle = _open_shard(shard)
        present = set(handle.keys())
        if expected is not None and not expected <= present:
            missing = ", ".join(sorted(expected - present)[:3])
            raise Refused(f"{shard} lacks tensors that {INDEX_NAME} places in it: {missing}. Fetch it again.")
        for name in handle.keys():  # noqa: SIM118 - safe_open is not iterable
            if name in self._tensors:
                raise Refused(f"{shard}: tensor {name!r} is stored a second time.")
            piece = handle.get_slice(name)
            dtype = _DTYPES.get(piece.get_dtype())
            if dtype is None:
                known = ", ".join(_DTYPES)
                raise Refused(f"{shard}: tensor {name!r} has dtype {piece.get_dtype()}; known are {known}.")
            self._tensors[name] = (handle, dtype, tuple(piece.get_shape()))


def read_json_object(root: Path, name: str) -> dict[str, Any]:
    """A JSON object in a file of a model directory. Refused when missing or malformed."""
    path = resolve_inside(root, name)
    if not path.is_file():
        raise Refused(f"{root} is not a model directory: it has no {name}.")
    try:
        body = json.loads(path.read_bytes())
    except ValueError as error:
        raise Refused(f"{root / name} is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise Refused(f"{root / name} must hold a JSON object, not a {type(body).__name__}.")
    return body


def _shards(root: Path) -> list[tuple[Path, set[str] | None]]:
    """(shard, names that the index places in it, or None without an index) in the order of file names."""
    if (root / INDEX_NAME).exists():
        weight_map = read_json_object(root, INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise Refused(f"{root / INDEX_NAME} has no `weight_map`.")
        names_of: dict[str, set[str]] = {}
        for tensor_name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
                raise Refused(
                    f"{root / INDEX_NAME} places {tensor_name!r} in {file_name!r}, not in safetensors."
                )
            names_of.setdefault(file_name, set()).add(tensor_name)
        paths = {name: resolve_inside(root, name) for name in sorted(names_of)}
        missing = [name for name, path in paths.items() if not path.is_file()]
        if missing:
            raise Refused(f"{root} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}.")
        return [(path, names_of[name]) for name, path in paths.items()]
    if (root / SINGLE_NAME).exists() or (root / SINGLE_NAME).is_symlink():
        path = resolve_inside(root, SINGLE_NAME)
        if not path.is_file():
            raise Refused(f"{root / SINGLE_NAME} is a broken link.")
        return [(path, None)]
    pickles = sorted(p.name for p in root.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise Refused(
            f"{root} holds weights only as pickle ({', '.join(pickles[:3])}), which can run code when it is "
            "loaded. Convert them to safetensors first."
        )
    raise Refused(f"{root} has neither {SINGLE_NAME} nor {INDEX_NAME}.")


def _open_shard(path: Path) -> Any:
    with path.open("rb") as file:
        head = file.read(16)
    is_pickle = (
        head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[2:3] != b"\0"
    )
    if head.startswith(_ZIP_MAGIC) or is_pickle:
        raise Refused(f"{path} is named .safetensors but holds a pickle, which is never loaded.")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise Refused(f"{path} is not a readable safetensors file: {error}.") from error
