"""Artifact directories: written to a sibling `.partial` directory, renamed when finished.

The order of events of a finish: files are hashed, `manifest.json` is written last into the partial
directory, an older artifact at the path steps aside, the partial directory is renamed to the path, and
only then is the older artifact removed. A directory without a manifest is therefore never finished, and
a kill at any point leaves either the old artifact or the new one at the path.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from bitsmith.core.digest import sha256_file
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import (
    MANIFEST_NAME,
    ArtifactKind,
    Fallback,
    Manifest,
    new_manifest_stamp,
    read_manifest,
)
from bitsmith.core.verified_hashes import verify_files_cached


@dataclass(slots=True)
class PendingArtifact:
    """An artifact under construction; files go to `partial`, facts are added as they become known."""

    partial: Path
    details: dict[str, Any] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    is_resumed: bool = False


class StagePlan(Protocol):
    """What every stage's plan says of the artifact that it will come to."""

    @property
    def stage_key(self) -> str: ...

    @property
    def parents(self) -> Mapping[str, str]: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def versions(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class ArtifactSpec:
    """What is to be made, known before work begins."""

    path: Path
    kind: ArtifactKind
    stage_key: str
    parents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, kind: ArtifactKind, plan: StagePlan) -> "ArtifactSpec":
        return cls(path, kind, plan.stage_key, plan.parents, plan.config, plan.versions)


def partial_path(path: Path) -> Path:
    """The sibling that work goes to. Raises Refused where `path` has no name, as "" and "/" have none."""
    if not path.name:
        raise Refused(f"{str(path)!r} does not name a directory to write; give its name.")
    return path.with_name(path.name + ".partial")


def read_finished(path: Path, kind: ArtifactKind) -> Manifest:
    """Manifest of a finished artifact of the given kind; Refused otherwise."""
    manifest = read_manifest(path)
    if manifest.kind != kind:
        raise Refused(f"{path} is an artifact of kind {manifest.kind}; {kind} is needed here.")
    return manifest


def find_finished(path: Path, key: str) -> Manifest | None:
    """The artifact at `path` if it is finished, intact and has this stage key, else None."""
    with contextlib.suppress(Refused):
        manifest = read_manifest(path)
        if manifest.stage_key == key:
            verify_files_cached(path, manifest)
            return manifest
    return None


@contextlib.contextmanager
def write_artifact(spec: ArtifactSpec, *, keep_partial: bool = False) -> Iterator[PendingArtifact]:
    """Write an artifact: yields the pending one, finishes it when the block ends without an error.

    keep_partial: leave an existing partial directory for the stage to resume from, and leave it there
    after an error. Otherwise a stale one is removed first, and removed again after an error.
    Raises Refused when another process is writing the same path or it cannot be written at all, WorkFailed
    when writing fails later, as on a full disk.
    """
    with _locked(spec.path):
        partial, is_resumed = _prepare(spec.path, keep_partial=keep_partial)
        pending = PendingArtifact(partial, is_resumed=is_resumed)
        try:
            yield pending
            _finish(spec, pending)
        except OSError as error:
            raise WorkFailed(f"Writing {spec.path} failed: {_reason(error)}.") from error
        finally:
            if not keep_partial and partial.exists():
                shutil.rmtree(partial, ignore_errors=True)


def _prepare(path: Path, *, keep_partial: bool) -> tuple[Path, bool]:
    """(partial directory, whether it holds something to resume from). The lock is held."""
    partial = partial_path(path)
    try:
        _restore_displaced(path)
        _check_replaceable(path)
        is_resumed = keep_partial and partial.is_dir()
        if partial.exists() and not is_resumed:
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)
        # A finish that was killed between its renames leaves one; as a payload file it would be false.
        (partial / MANIFEST_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {_reason(error)}.") from error
    return partial, is_resumed


def _check_replaceable(path: Path) -> None:
    is_foreign = path.exists() and not (path / MANIFEST_NAME).is_file()
    if is_foreign and (not path.is_dir() or any(path.iterdir())):
        raise Refused(f"{path} exists and is not an artifact; choose another --out or move it away.")


def _finish(spec: ArtifactSpec, pending: PendingArtifact) -> None:
    partial, path = pending.partial, spec.path
    made_at, made_on = new_manifest_stamp()
    manifest = Manifest(
        kind=spec.kind,
        stage_key=spec.stage_key,
        parents=dict(spec.parents),
        config=dict(spec.config),
        versions=dict(spec.versions),
        files=hash_files(partial),
        details=pending.details,
        fallbacks=tuple(pending.fallbacks),
        made_at=made_at,
        made_on=made_on,
    )
    text = manifest.to_json()
    for name in manifest.files:
        _sync(partial / name)
    (partial / MANIFEST_NAME).write_text(text, encoding="utf-8")
    _sync(partial / MANIFEST_NAME)
    _sync(partial)
    displaced = _displaced_path(path)
    if path.exists():
        path.rename(displaced)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(displaced, ignore_errors=True)


def hash_files(directory: Path, *, hash_file: Callable[[Path], str] = sha256_file) -> dict[str, str]:
    """Relative POSIX path -> SHA-256 for every file below `directory`, sorted by path."""
    paths: Sequence[Path] = sorted(p for p in directory.rglob("*") if p.is_file())
    return {p.relative_to(directory).as_posix(): hash_file(p) for p in paths}


def _displaced_path(path: Path) -> Path:
    return path.with_name(path.name + ".displaced")


def _restore_displaced(path: Path) -> None:
    """Undo a finish that was killed between its two renames, or clear what it left behind."""
    displaced = _displaced_path(path)
    if displaced.exists():
        if path.exists():
            shutil.rmtree(displaced)
        else:
            displaced.rename(path)


def _sync(path: Path) -> None:
    """Have a file's bytes, or a directory's names, reach the disk before anything that relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{reason} ({error.filename})" if error.filename else reason


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire(timeout=0)
    except Timeout:
        raise Refused(
            f"Another bitsmith process is writing {path}; wait for it or choose another --out."
        ) from None
    except OSError as error:
        raise Refused(f"{path} cannot be written: {_reason(error)}.") from error
    try:
        yield
    finally:
        lock.release()
