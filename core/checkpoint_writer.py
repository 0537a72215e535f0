"""Write a state dict as Hugging Face safetensors, one tensor at a time, in shards of bounded size.

Does not know what the tensors mean. Memory held: the tensors of one shard.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DEFAULT_SHARD_BYTES = 2 << 30


class CheckpointWriter:
    """Collects tensors by `add`; `finish` gives the shards their final names and writes the index."""

    def __init__(self, directory: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self._names, name
        num_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + num_bytes > self._max_shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += num_bytes
        self._total_bytes += num_bytes

    def finish(self) -> None:
        self._flush()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self._directory / SINGLE_NAME)
            return
        weight_map: dict[str, str] = {}
        for index, (path, names) in enumerate(self._shards, start=1):
            final = f"model-{index:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self._directory / final)
            weight_map.update(dict.fromkeys(names, final))
        index_body = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        text = json.dumps(index_body, indent=2) + "\n"
        (self._directory / INDEX_NAME).write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        path = self._directory / f"shard-{len(self._shards) + 1:05d}.safetensors"
        # Transformers refuses a file whose metadata does not name the framework.
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner may read
        self._shards.append((path, list(self._pending)))
        self._pending = {}
        self._pending_bytes = 0
