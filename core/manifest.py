"""`manifest.json`: what an artifact is, what it was made from, and the SHA-256 of every file in it."""

import dataclasses
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bitsmith.core.digest import canonical_json, content_digest, sha256_bytes, sha256_file
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.model_files import resolve_inside

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

ArtifactKind = Literal["quantized-checkpoint", "engine", "quality-report"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """One thing that was not done as asked: where, what was asked, what was done, why."""

    where: str
    asked: str
    done: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about a finished artifact.

    parents: role (such as `model`, `checkpoint`, `baseline`) -> content digest.
    config: the full resolved configuration. versions: tools that affect the result.
    files: relative path -> SHA-256. details: what the stage wants to say of its result.
    """

    kind: ArtifactKind
    stage_key: str
    parents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, str]
    details: Mapping[str, Any] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()
    made_at: str = ""
    made_on: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def content_digest(self) -> str:
        return content_digest(self.files)

    def to_json(self) -> str:
        """Pretty JSON whose last field is the SHA-256 of the canonical JSON of all the others.

        Raises WorkFailed naming the field when a number in it is not finite: JSON has no such number, and
        a result that holds one is not fit to be used.
        """
        unchecked = dataclasses.asdict(self) | {"content_digest": self.content_digest}
        for field_path in _non_finite(unchecked, ""):
            raise WorkFailed(
                f"The manifest's field {field_path} is not a finite number; nothing was finished."
            )
        # By way of JSON, so that what is hashed is what will be read: keys become text, tuples lists.
        body = json.loads(json.dumps(unchecked))
        body["manifest_sha256"] = sha256_bytes(canonical_json(body))
        return json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _non_finite(value: Any, path: str) -> Iterator[str]:
    """Paths of the numbers in a nested value that are NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _non_finite(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _non_finite(entry, f"{path}[{index}]")


def new_manifest_stamp() -> tuple[str, str]:
    """When and on what machine: the two fields of a manifest that never enter a digest."""
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return datetime.now(UTC).isoformat(timespec="seconds"), machine


def read_manifest(directory: Path) -> Manifest:
    """Read and check a manifest by its own digest; the files it lists are not read here.

    Raises Refused when it is missing, damaged, or of an unknown schema version.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise Refused(f"{directory} is not a finished artifact: it has no {MANIFEST_NAME}.")
    try:
        body = json.loads(path.read_bytes())
        version, claimed = body["schema_version"], body.pop("manifest_sha256")
        actual = sha256_bytes(canonical_json(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{path} is damaged ({error}). Make the artifact again.") from error
    if version != SCHEMA_VERSION:
        raise Refused(f"{path} has schema version {version!r}; this release reads {SCHEMA_VERSION}.")
    if claimed != actual:
        raise Refused(f"{path} does not match its own SHA-256: it was changed after it was written.")
    try:
        body.pop("content_digest")
        body["fallbacks"] = tuple(Fallback(**entry) for entry in body["fallbacks"])
        return Manifest(**body)
    except (KeyError, TypeError) as error:
        raise Refused(
            f"{path} lacks a field or has an unknown one ({error}). Make the artifact again."
        ) from error


def verify_files(
    directory: Path, manifest: Manifest, *, hash_file: Callable[[Path], str] = sha256_file
) -> None:
    """Compare every file with the manifest. Raises Refused naming the first file that differs."""
    for name, expected in sorted(manifest.files.items()):
        path = resolve_inside(directory, name)
        if not path.is_file():
            raise Refused(f"{directory}: file {name} is missing. Make the artifact again.")
        if hash_file(path) != expected:
            raise Refused(f"{directory}: file {name} does not match its SHA-256 in {MANIFEST_NAME}.")
    # A link to a directory is not walked into, so it counts as a file here and must be listed.
    found = (p for p in directory.rglob("*") if p.is_symlink() or not p.is_dir())
    present = {p.relative_to(directory).as_posix() for p in found}
    for name in sorted(present - set(manifest.files) - {MANIFEST_NAME}):
        raise Refused(f"{directory}: file {name} is not listed in {MANIFEST_NAME}. Remove it.")
