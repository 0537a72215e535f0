"""Finished layers of an unfinished run, kept in its partial directory.

Order of events for a layer: its tensors and the hidden states after it are written under temporary names
and renamed, then its report, which holds their SHA-256, is renamed into place: only then does the layer
count as finished. The hidden states of the layer before are removed last. A kill between any two of
these loses at most the layer at hand. Not known here: what is in the reports and tensors.
"""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitsmith.core.digest import sha256_file
from bitsmith.core.errors import Refused

_DIRECTORY = "resume-state"
_FINGERPRINT = "fingerprint.json"


class ResumeState:
    """The state directory of one run."""

    def __init__(self, partial: Path, fingerprint: Mapping[str, Any], name: str = _DIRECTORY) -> None:
        """name: of the directory. Raises Refused when there is state of another run, saying what differs."""
        self._directory = partial / name
        self._directory.mkdir(exist_ok=True)
        path = self._directory / _FINGERPRINT
        wanted = _flatten({**fingerprint, "machine": machine_facts()})
        if path.is_file():
            _check_fingerprint(_read_json(path), wanted, partial)
        else:
            _write_text(path, json.dumps(wanted, indent=1))

    def num_finished(self) -> int:
        """Layers finished, counted from the first."""
        index = 0
        while self._report_path(index).is_file():
            index += 1
        return index

    def save(
        self, index: int, body: Mapping[str, Any], tensors: Mapping[str, Tensor], hidden: Sequence[Tensor]
    ) -> None:
        """body: what is to be known of the layer, as JSON. hidden: by batch, the layer's outputs; empty when
        no later layer needs them."""
        digests = {"tensors": self._save_tensors(self._tensors_path(index), tensors)}
        if hidden:
            by_batch = {f"{batch:05d}": states for batch, states in enumerate(hidden)}
            digests["hidden"] = self._save_tensors(self._hidden_path(index), by_batch)
        _write_text(self._report_path(index), json.dumps({**body, "sha256": digests}))
        self._hidden_path(index - 1).unlink(missing_ok=True)

    def load_body(self, index: int) -> dict[str, Any]:
        return _read_json(self._report_path(index))

    def load_tensors(self, index: int) -> dict[str, Tensor]:
        return self._load(self._tensors_path(index), index, "tensors")

    def tensor_names(self) -> frozenset[str]:
        """Of all finished layers; their values are not read."""
        names: set[str] = set()
        for index in range(self.num_finished()):
            with safe_open(self._tensors_path(index), "pt") as file:
                names.update(file.keys())
        return frozenset(names)

    def load_hidden(self, index: int) -> list[Tensor]:
        """Layer `index`'s outputs by batch; [] when none were kept."""
        if "hidden" not in _read_json(self._report_path(index))["sha256"]:
            return []
        by_batch = self._load(self._hidden_path(index), index, "hidden")
        return [by_batch[name] for name in sorted(by_batch)]

    def remove(self) -> None:
        shutil.rmtree(self._directory)

    def _save_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> str:
        temporary = path.with_suffix(".tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        digest = sha256_file(temporary)
        temporary.rename(path)
        return digest

    def _load(self, path: Path, index: int, kind: str) -> dict[str, Tensor]:
        expected = _read_json(self._report_path(index))["sha256"][kind]
        if not path.is_file() or sha256_file(path) != expected:
            raise Refused(f"{path} is missing or damaged. {_start_over(self._directory.parent)}")
        try:
            return load_file(path)
        except SafetensorError as error:
            raise Refused(
                f"{path} cannot be read ({error}). {_start_over(self._directory.parent)}"
            ) from error

    def _tensors_path(self, index: int) -> Path:
        return self._directory / f"layer-{index:05d}.safetensors"

    def _hidden_path(self, index: int) -> Path:
        return self._directory / f"hidden-{index:05d}.safetensors"

    def _report_path(self, index: int) -> Path:
        return self._directory / f"layer-{index:05d}.json"


def machine_facts() -> dict[str, Any]:
    """What on a machine can change the last bit of a sum."""
    return {
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> {"a.b": leaf}, so that a difference has a name."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        flat |= _flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _check_fingerprint(found: Mapping[str, Any], wanted: Mapping[str, Any], partial: Path) -> None:
    differing = [
        f"{key} was {found.get(key)!r} and is now {wanted.get(key)!r}"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]
    if differing:
        raise Refused(
            f"The unfinished run in {partial} cannot be resumed: {'; '.join(differing)}. "
            f"{_start_over(partial)}"
        )


def _start_over(partial: Path) -> str:
    return f"Remove {partial} to start over."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except ValueError as error:
        raise Refused(f"{path} is damaged ({error}). {_start_over(path.parent.parent)}") from error
    assert isinstance(body, dict)
    return body


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)
