"""A changed byte is found and named, wherever it is."""

import json
from pathlib import Path

import pytest

from bitsmith.core.artifact import ArtifactSpec, write_artifact
from bitsmith.core.digest import canonical_json, content_digest, sha256_bytes
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import MANIFEST_NAME, Fallback, read_manifest, verify_files
from bitsmith.core.verified_hashes import verify_files_cached


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    spec = ArtifactSpec(
        path, "engine", "k" * 64, parents={"model": "m"}, config={"bits": 4}, versions={"torch": "2"}
    )
    with write_artifact(spec) as pending:
        (pending.partial / "a.bin").write_bytes(bytes(range(256)))
        (pending.partial / "tokenizer").mkdir()
        (pending.partial / "tokenizer" / "b.json").write_text("{}")
        pending.details = {"note": "é東"}
        pending.fallbacks.append(Fallback("layer 3", "gptq", "rtn", "not positive definite"))
    return path


def rewrite(path: Path, change: dict[str, object], *, removed: str | None = None) -> None:
    """A manifest that is changed and signed again, as another release would have written it."""
    body = json.loads((path / MANIFEST_NAME).read_text()) | change
    body.pop("manifest_sha256")
    body.pop(removed, None) if removed else None
    body["manifest_sha256"] = sha256_bytes(canonical_json(body))
    (path / MANIFEST_NAME).write_text(json.dumps(body))


def test_reading_gives_back_what_was_written(finished: Path) -> None:
    manifest = read_manifest(finished)
    assert (manifest.kind, manifest.stage_key) == ("engine", "k" * 64)
    assert (manifest.parents, manifest.config, manifest.versions) == (
        {"model": "m"},
        {"bits": 4},
        {"torch": "2"},
    )
    assert manifest.details == {"note": "é東"}
    assert manifest.fallbacks == (Fallback("layer 3", "gptq", "rtn", "not positive definite"),)
    assert list(manifest.files) == ["a.bin", "tokenizer/b.json"]
    assert manifest.content_digest == content_digest(manifest.files)


def test_every_changed_byte_of_the_manifest_is_refused(finished: Path) -> None:
    path = finished / MANIFEST_NAME
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(Refused, match=MANIFEST_NAME):
            read_manifest(finished)
    path.write_bytes(original)
    read_manifest(finished)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"schema_version": 1}', "[" * 100_000])
def test_a_manifest_that_is_none_is_refused(text: str, finished: Path) -> None:
    (finished / MANIFEST_NAME).write_text(text)
    with pytest.raises(Refused, match="damaged"):
        read_manifest(finished)


def test_an_unknown_schema_version_is_refused_with_both_versions(finished: Path) -> None:
    rewrite(finished, {"schema_version": 2})
    with pytest.raises(Refused, match="schema version 2; this release reads 1"):
        read_manifest(finished)


def test_unknown_and_missing_fields_are_refused(finished: Path) -> None:
    rewrite(finished, {"surprise": 1})
    with pytest.raises(Refused, match="surprise"):
        read_manifest(finished)
    rewrite(finished, {}, removed="surprise")
    read_manifest(finished)
    rewrite(finished, {}, removed="fallbacks")
    with pytest.raises(Refused, match="fallbacks"):
        read_manifest(finished)


@pytest.mark.parametrize("verify", [verify_files, verify_files_cached])
@pytest.mark.parametrize("name", ["a.bin", "tokenizer/b.json"])
def test_a_changed_byte_of_any_file_is_found_and_the_file_named(verify, name: str, finished: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = read_manifest(finished)
    verify(finished, manifest)
    data = bytearray((finished / name).read_bytes())
    data[-1] ^= 1
    (finished / name).write_bytes(data)
    with pytest.raises(Refused, match=f"file {name} does not match"):
        verify(finished, manifest)


def test_missing_and_extra_files_are_named(finished: Path) -> None:
    manifest = read_manifest(finished)
    (finished / "tokenizer" / "extra").write_text("")
    with pytest.raises(Refused, match="tokenizer/extra is not listed"):
        verify_files(finished, manifest)
    (finished / "tokenizer" / "extra").unlink()
    (finished / "linked").symlink_to(finished / "tokenizer")
    with pytest.raises(Refused, match="linked is not listed"):
        verify_files(finished, manifest)
    (finished / "linked").unlink()
    (finished / "a.bin").unlink()
    with pytest.raises(Refused, match=r"a\.bin is missing"):
        verify_files(finished, manifest)


def test_a_file_list_that_leads_out_of_the_artifact_is_refused(finished: Path) -> None:
    (finished.parent / "secret").write_text("secret")
    rewrite(finished, {"files": {"../secret": sha256_bytes(b"secret")}})
    with pytest.raises(Refused, match="not a plain path"):
        verify_files(finished, read_manifest(finished))


def test_neither_time_nor_machine_enters_the_digests(finished: Path) -> None:
    before = read_manifest(finished)
    rewrite(finished, {"made_at": "1999-12-31T23:59:59+00:00", "made_on": "elsewhere"})
    after = read_manifest(finished)
    assert (after.content_digest, after.stage_key) == (before.content_digest, before.stage_key)
