"""Writing one rank file: the header first, from the layout's tables, then tensors in any order.

Because names, dtypes and shapes are laid down before any tensor is known, a file that is finished has the
contract's layout. Memory held: one tensor.
"""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from bitsmith.compile.tensor_file import torch_dtype
from bitsmith.compile.tensorrt_layout import Specs

_CODES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
}
_ALIGNMENT = 64  # of the data's start, so that tensors can be memory-mapped aligned


class RankWriter:
    """A context manager; leaving it without an error requires that every tensor was written once."""

    def __init__(self, path: Path, specs: Specs) -> None:
        self._specs = specs
        self._missing = set(specs)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {}
        position = 0
        for name, spec in specs.items():
            num_bytes = math.prod(spec.shape) * torch_dtype(spec.dtypes[0]).itemsize
            self._offsets[name] = position
            header[name] = {
                "dtype": _CODES[spec.dtypes[0]],
                "shape": list(spec.shape),
                "data_offsets": [position, position + num_bytes],
            }
            position += num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + position)

    def write(self, name: str, tensor: Tensor) -> None:
        spec = self._specs[name]
        assert name in self._missing, name
        assert tensor.dtype == torch_dtype(spec.dtypes[0]), (name, tensor.dtype, spec)
        assert tuple(tensor.shape) == spec.shape, (name, tensor.shape, spec)
        self._file.seek(self._start + self._offsets[name])
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def __enter__(self) -> "RankWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or not self._missing, sorted(self._missing)[:5]
