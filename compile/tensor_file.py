"""One safetensors file: its header without its data, and its tensors one at a time.

Unlike a model directory's reader it takes any file, damaged ones included, and says what is wrong with it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitsmith.core.errors import Refused

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class TensorFile:
    """header: name -> (dtype as torch names it, shape). handle: the open, memory-mapped file."""

    path: Path
    header: dict[str, tuple[str, tuple[int, ...]]]
    handle: Any

    def tensor(self, name: str) -> Tensor:
        """The tensor; its memory is the file's as long as nothing writes to it."""
        value: Tensor = self.handle.get_tensor(name)
        return value


def open_tensor_file(path: Path) -> TensorFile:
    """Read the header. Raises Refused naming the file when it is not a whole safetensors file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise Refused(f"{path} is not a safetensors file.")
            body = json.loads(file.read(length))
        handle: Any = safe_open(path, framework="pt")  # verifies offsets and the file's size
        names = set(handle.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise Refused(f"{path} is not a whole safetensors file ({error}); copy or make it again.") from error
    header = {
        name: (_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
        for name, entry in body.items()
        if name in names
    }
    return TensorFile(path, header, handle)


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` -> torch.bfloat16."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
