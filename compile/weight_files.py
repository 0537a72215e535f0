"""Weights of an engine on disk: safetensors whose tensors all start at multiples of 64 bytes.

So they can be used where they lie in a mapped file. Safetensors allows no gaps: where a tensor's size is not
a multiple of 64, a named padding tensor follows it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitsmith.core.errors import Refused
from bitsmith.core.huge_pages import allocate_in_huge_pages

ALIGNMENT = 64
_SHARD_BYTES = 1 << 30
_PADDING_NAME = "padding."
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


class WeightFilesWriter:
    """Collects tensors and writes a `weights-NNNNN.safetensors` whenever a shard is full."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._num_shards = 0
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._shard[name] = tensor.contiguous()
            self._shard_bytes += tensor.nbytes
        if self._shard_bytes >= _SHARD_BYTES:
            self._flush()

    def finish(self) -> None:
        if self._shard:
            self._flush()

    def _flush(self) -> None:
        self._num_shards += 1
        write_aligned(self._directory / f"weights-{self._num_shards:05}.safetensors", self._shard)
        self.num_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0


def write_aligned(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file in which every tensor starts at a multiple of ALIGNMENT bytes."""
    header: dict[str, dict[str, object]] = {}
    offset = 0

    def describe(name: str, dtype: str, shape: list[int], num_bytes: int) -> None:
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes

    for name, tensor in tensors.items():
        describe(name, _DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes)
        if padding := -offset % ALIGNMENT:
            describe(f"{_PADDING_NAME}{name}", "U8", [padding], padding)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.write(b"\0" * (-tensor.nbytes % ALIGNMENT))


def map_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the weight files, mapped from the page cache and not copied."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("weights-*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    if not name.startswith(_PADDING_NAME):
                        tensors[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise Refused(f"{path} is not a valid safetensors file: {error}.") from error
    misaligned = [name for name, tensor in tensors.items() if tensor.data_ptr() % ALIGNMENT]
    assert not misaligned, misaligned[:3]
    return tensors


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the weight files, in private memory of huge pages where the system gives them.

    A step streams all weights (docs/adr/0009). Tensors keep their alignment.
    """
    mapped = map_weights(directory)
    size = sum(_aligned(tensor.nbytes) for tensor in mapped.values())
    buffer = allocate_in_huge_pages(max(size, ALIGNMENT))
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, tensor in mapped.items():
        part = buffer[start : start + tensor.nbytes]
        part.copy_(tensor.reshape(-1).view(torch.uint8))
        tensors[name] = part.view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)
    return tensors


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
