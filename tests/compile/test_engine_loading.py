"""An engine from another world, or with a changed byte, is refused before anything of it is loaded."""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bitsmith.compile import engine as engine_module
from bitsmith.compile import trusted_engines
from bitsmith.compile.engine import PACKAGE_NAME, Engine
from bitsmith.compile.job import CompileJob, compile_engine, plan_compile
from bitsmith.compile.step_runner import check_package
from bitsmith.core.artifact import hash_files
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import MANIFEST_NAME, read_manifest
from bitsmith.core.progress import Reporter
from bitsmith.ops import isa
from bitsmith.ops.isa import FORM_ISA


@pytest.fixture
def copied_engine(quantized_engine_path: Path, tmp_path: Path) -> Path:
    """A copy of a finished engine; a copy has the same digest and is trusted like the original."""
    target = tmp_path / "engine"
    shutil.copytree(quantized_engine_path, target)
    return target


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something of a refused engine was loaded")

    monkeypatch.setattr(engine_module, "load_operators", never)


def _rewrite_manifest(path: Path, **changes: Any) -> None:
    """A manifest that agrees with itself and with the files, as another builder would write it."""
    manifest = read_manifest(path)
    (path / MANIFEST_NAME).unlink()
    rewritten = dataclasses.replace(manifest, files=hash_files(path), **changes)
    (path / MANIFEST_NAME).write_text(rewritten.to_json())


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_changed_byte_in_any_file_is_found_and_named(copied_engine: Path) -> None:
    names = [*read_manifest(copied_engine).files, MANIFEST_NAME]
    assert {"model.pt2", "operators.so", "decoder.json", "parity.json", "tokenizer/config.json"} <= set(names)
    for name in names:
        path = copied_engine / name
        original = path.read_bytes()
        middle = len(original) // 2
        path.write_bytes(original[:middle] + bytes([original[middle] ^ 1]) + original[middle + 1 :])
        with pytest.raises(Refused, match=name):
            Engine.load(copied_engine)
        path.write_bytes(original)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_missing_and_an_added_file_are_named(copied_engine: Path) -> None:
    (copied_engine / "extra.so").write_bytes(b"x")
    with pytest.raises(Refused, match=r"extra\.so"):
        Engine.load(copied_engine)
    (copied_engine / "extra.so").unlink()
    (copied_engine / "operators.so").unlink()
    with pytest.raises(Refused, match=r"operators\.so"):
        Engine.load(copied_engine)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("field", "value"),
    [("torch", "2.12.0"), ("block_layout", "other-v9"), ("weight_layout", "other-v9"), ("isa", ["avx9000"])],
)
def test_an_engine_for_another_world_names_both_values_and_the_rebuild(
    field: str, value: Any, copied_engine: Path
) -> None:
    config = dict(read_manifest(copied_engine).config)
    built = config[field]
    _rewrite_manifest(copied_engine, config=config | {field: value})
    with pytest.raises(Refused, match="bitsmith compile") as refusal:
        Engine.load(copied_engine, trust=True)
    text = str(refusal.value)
    assert str(value if isinstance(value, str) else value[0]) in text
    assert field == "isa" or str(built) in text


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_engine_of_a_wider_processor_names_what_this_one_lacks(
    copied_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are in another form too, so that nothing of it may be loaded."""
    narrow, wide = FORM_ISA["avx2"], FORM_ISA["avx512_vnni"]
    config = dict(read_manifest(copied_engine).config)
    _rewrite_manifest(copied_engine, config=config | {"isa": sorted(wide)})
    monkeypatch.setattr(isa, "cpu_flags", lambda: narrow)
    with pytest.raises(Refused, match="bitsmith compile") as refusal:
        Engine.load(copied_engine, trust=True)
    assert ", ".join(sorted(wide - narrow)) in str(refusal.value)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_unknown_schema_version_is_refused(copied_engine: Path) -> None:
    _rewrite_manifest(copied_engine, schema_version=99)
    with pytest.raises(Refused, match="schema version 99"):
        Engine.load(copied_engine, trust=True)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_directory_that_is_not_an_engine(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not a finished artifact"):
        Engine.load(tmp_path)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_engine_that_was_not_built_here_needs_trust(copied_engine: Path) -> None:
    (copied_engine / "decoder.json").write_text((copied_engine / "decoder.json").read_text() + " ")
    _rewrite_manifest(copied_engine)
    with pytest.raises(Refused, match="--trust-engine"):
        Engine.load(copied_engine)


def test_trust_loads_it(copied_engine: Path) -> None:
    (copied_engine / "decoder.json").write_text((copied_engine / "decoder.json").read_text() + " ")
    _rewrite_manifest(copied_engine)
    assert Engine.load(copied_engine, trust=True).vocab_size == 301


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_list_that_others_could_write_trusts_nothing(copied_engine: Path, _own_trust_list: Path) -> None:
    path = _own_trust_list / "trusted-engines.json"
    path.chmod(0o666)
    try:
        with pytest.raises(Refused, match="--trust-engine"):
            Engine.load(copied_engine)
    finally:
        path.chmod(0o600)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_digest_of_another_machine_is_not_trusted(
    copied_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_engines, "_machine", lambda: "another")
    with pytest.raises(Refused, match="--trust-engine"):
        Engine.load(copied_engine)


@pytest.mark.parametrize(
    "name",
    [
        "model/data/weights/weight_0",
        "model/data/models/model.json",
        "model/data/aotinductor/model/../../x.so",
    ],
)
def test_a_package_that_holds_more_than_code_is_refused(name: str, copied_engine: Path) -> None:
    with zipfile.ZipFile(copied_engine / PACKAGE_NAME, "a") as archive:
        archive.writestr(name, b"\x80\x04pickle")
    with pytest.raises(Refused, match="only compiled code"):
        check_package(copied_engine / PACKAGE_NAME)


def test_the_package_holds_no_weights(quantized_engine_path: Path) -> None:
    check_package(quantized_engine_path / PACKAGE_NAME)


def test_the_manifest_tells_what_was_built(quantized_engine_path: Path) -> None:
    manifest = read_manifest(quantized_engine_path)
    assert manifest.config["kv_cache"] == "fp8"
    assert manifest.config["limits"] == {"max_batch_size": 32, "max_num_tokens": 1024, "max_model_len": 256}
    assert manifest.details["kv_bytes_per_token"] == 2 * 2 * 2 * 16
    assert "fp8 KV cache, calibrated scales" in manifest.details["arithmetic"]
    parity = json.loads((quantized_engine_path / "parity.json").read_text())
    assert set(parity["phases"]) == {"prefill", "decode", "mixed"}
    rows = {row["kv_cache"]: row for row in parity["kv_caches"]}
    assert list(rows) == ["bf16", "fp8", "int8"] and parity["kv_caches"] == manifest.details["kv_caches"]
    assert rows["fp8"]["quality"]["kl_bf16"] > rows["bf16"]["quality"]["kl_bf16"] == 0
    assert parity["text"]["source"] == "built-in text"


def test_the_tokenizer_is_copied_byte_for_byte(dense_job: CompileJob, dense_engine_path: Path) -> None:
    copied = {path.name: path.read_bytes() for path in (dense_engine_path / "tokenizer").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= copied.keys()
    assert all(data == (dense_job.checkpoint / name).read_bytes() for name, data in copied.items())


def test_a_finished_engine_is_not_compiled_again(
    dense_job: CompileJob, dense_engine_path: Path, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("bitsmith.compile.job.compile_package", never)
    manifest = compile_engine(dense_job, plan_compile(dense_job), reporter)
    assert manifest == read_manifest(dense_engine_path)
