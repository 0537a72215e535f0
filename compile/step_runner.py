"""Two ways to run the same decoder: the compiled package, or the module itself (`enforce_eager`)."""

import dataclasses
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bitsmith.compile.decoder import Decoder
from bitsmith.compile.kv_cache import KVCache
from bitsmith.core.errors import Refused
from bitsmith.core.model_input import ModelInput

_MODEL_NAME = "model"
# What a package without weights holds. Anything else (pickled weights, an exported program whose loading
# would unpickle) is refused before the file is opened by torch.
_ALLOWED_SUFFIXES = (".cpp", ".json", ".so")
_ALLOWED_NAMES = frozenset(
    {"archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id"}
)
_INPUT_NAMES = tuple(field.name for field in dataclasses.fields(ModelInput))


class StepRunner(Protocol):
    """Runs one step: logits [L, vocab_size] of the rows asked for; the cache is written in place."""

    def run(self, model_input: ModelInput, kv_cache: KVCache) -> Tensor: ...


def input_tensors(model_input: ModelInput) -> list[Tensor]:
    """The tensors of a step in the order in which the decoder takes them."""
    return [getattr(model_input, name) for name in _INPUT_NAMES]


class EagerRunner:
    """The module and its operators without the compiler: for debugging and for proofs of equality."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(self, model_input: ModelInput, kv_cache: KVCache) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._decoder(*input_tensors(model_input), kv_cache.keys, kv_cache.values)
        return logits


class CompiledRunner:
    """The compiled package over the engine's weights."""

    def __init__(self, package: Path, decoder: Decoder) -> None:
        check_package(package)
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(package), _MODEL_NAME, False, 1, -1)
        weights = _constants(self._loader.get_constant_fqns(), decoder)
        # The package keeps pointers into these tensors and copies nothing: they must live as long as it.
        self._weights = weights
        self._loader.load_constants(weights, False, True, True)

    def run(self, model_input: ModelInput, kv_cache: KVCache) -> Tensor:
        inputs = [*input_tensors(model_input), *kv_cache.keys, *kv_cache.values]
        logits: Tensor = self._loader.run(inputs)[0]
        return logits


def _constants(names: list[str], decoder: Decoder) -> dict[str, Tensor]:
    buffers: Mapping[str, Tensor] = dict(decoder.named_buffers(remove_duplicate=False))
    unknown = sorted(set(names) - buffers.keys())
    if unknown:
        raise Refused(f"The compiled package wants a weight {unknown[0]!r} that the engine does not have.")
    return {name: buffers[name] for name in names}


def check_package(package: Path) -> None:
    """Refuse a package that holds anything but compiled code and its description."""
    try:
        with zipfile.ZipFile(package) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise Refused(f"{package} is not a compiled package: {error}.") from error
    for name in names:
        inner = name.split("/", 1)[-1]
        is_code = inner.startswith(f"data/aotinductor/{_MODEL_NAME}/") and inner.endswith(_ALLOWED_SUFFIXES)
        if ".." in inner.split("/") or not (is_code or inner in _ALLOWED_NAMES):
            raise Refused(f"{package} holds {inner!r}; only compiled code without weights is loaded.")
