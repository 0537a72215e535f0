"""An artifact is finished or not there; whatever interrupts a finish, one whole artifact remains."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsmith.core import artifact as artifact_module
from bitsmith.core.artifact import ArtifactSpec, find_finished, partial_path, read_finished, write_artifact
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import MANIFEST_NAME, read_manifest, verify_files


def spec_of(path: Path, key: str = "key") -> ArtifactSpec:
    return ArtifactSpec(path, "engine", key, parents={}, config={}, versions={})


def make(path: Path, text: str, key: str = "key") -> None:
    with write_artifact(spec_of(path, key)) as pending:
        (pending.partial / "sub").mkdir()
        (pending.partial / "sub" / "payload.txt").write_text(text)


def payload(path: Path) -> str:
    verify_files(path, read_manifest(path))
    return (path / "sub" / "payload.txt").read_text()


def test_a_finished_artifact_verifies_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out"
    make(path, "new")
    assert payload(path) == "new"
    assert sorted(p.name for p in path.parent.iterdir()) == [".out.lock", "out"]


def test_nothing_looks_finished_while_work_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out"
    make(path, "old")
    with write_artifact(spec_of(path)) as pending:
        (pending.partial / "x").write_text("x")
        assert not (pending.partial / MANIFEST_NAME).exists()
        assert payload(path) == "old"


def test_an_error_leaves_the_older_artifact_and_no_partial(tmp_path: Path) -> None:
    path = tmp_path / "out"
    make(path, "old")
    with pytest.raises(RuntimeError, match="boom"), write_artifact(spec_of(path)):
        raise RuntimeError("boom")
    assert payload(path) == "old"
    assert not partial_path(path).exists()


@pytest.mark.parametrize("step", ["_sync", "hash_files"])
def test_a_full_disk_is_told_plainly_and_the_older_artifact_stays(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    make(path, "old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "big"))

    with monkeypatch.context() as patch:
        patch.setattr(artifact_module, step, full)
        with pytest.raises(WorkFailed, match=r"No space left on device \(.*big\)"):
            make(path, "new")
    assert payload(path) == "old"
    assert not partial_path(path).exists()


def test_a_full_disk_in_the_stage_keeps_what_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with (
        pytest.raises(WorkFailed, match="No space left"),
        write_artifact(spec_of(path), keep_partial=True) as pending,
    ):
        (pending.partial / "layer-0").write_text("done")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with write_artifact(spec_of(path), keep_partial=True) as pending:
        assert pending.is_resumed
        assert (pending.partial / "layer-0").read_text() == "done"
    assert read_manifest(path).files.keys() == {"layer-0"}


def test_without_keep_partial_a_stale_partial_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "out"
    partial_path(path).mkdir()
    (partial_path(path) / "stale").write_text("stale")
    with write_artifact(spec_of(path)) as pending:
        assert not pending.is_resumed
    assert read_manifest(path).files == {}


# The events of a finish are: old steps aside (rename 1), new takes its place (rename 2), old is removed.
@pytest.mark.parametrize(
    ("killed_at", "remains"),
    [("rename 1", "old"), ("rename 2", "old"), ("rmtree", "new")],
)
def test_a_kill_during_the_finish_leaves_one_whole_artifact(
    killed_at: str, remains: str, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    make(path, "old")
    script = f"""
        import os, shutil
        from pathlib import Path
        from bitsmith.core import artifact
        from bitsmith.core.artifact import ArtifactSpec, write_artifact

        num_renames = 0
        rename = Path.rename

        def counted_rename(self, target):
            global num_renames
            num_renames += 1
            if {killed_at!r} == f"rename {{num_renames}}":
                os._exit(9)
            return rename(self, target)

        path = Path({str(path)!r})
        with write_artifact(ArtifactSpec(path, "engine", "key", {{}}, {{}}, {{}})) as pending:
            (pending.partial / "sub").mkdir()
            (pending.partial / "sub" / "payload.txt").write_text("new")
            Path.rename = counted_rename
            if {killed_at!r} == "rmtree":
                shutil.rmtree = lambda *_, **__: os._exit(9)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert result.returncode == 9
    if path.exists():
        assert payload(path) == remains
    # The next writer puts the older one back first, and its own failure does not hurt it either.
    with pytest.raises(RuntimeError), write_artifact(spec_of(path)):
        assert payload(path) == remains
        raise RuntimeError
    assert payload(path) == remains
    make(path, "newest")
    assert payload(path) == "newest"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.lock", "out"]


def test_a_manifest_left_in_a_partial_directory_is_not_taken_for_payload(tmp_path: Path) -> None:
    path = tmp_path / "out"
    partial_path(path).mkdir()
    (partial_path(path) / MANIFEST_NAME).write_text("{}")
    with write_artifact(spec_of(path), keep_partial=True):
        pass
    manifest = read_manifest(path)
    verify_files(path, manifest)
    assert MANIFEST_NAME not in manifest.files


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    script = f"""
        from pathlib import Path
        from bitsmith.core.artifact import ArtifactSpec, write_artifact
        from bitsmith.core.errors import Refused
        try:
            with write_artifact(ArtifactSpec(Path({str(path)!r}), "engine", "key", {{}}, {{}}, {{}})):
                print("wrote")
        except Refused as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with write_artifact(spec_of(path)) as pending:
        (pending.partial / "mine").write_text("mine")
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"Another bitsmith process is writing {path}" in said
        assert (pending.partial / "mine").exists()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "wrote\n"


def test_a_directory_that_is_no_artifact_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter-1.tex").write_text("years of work")
    with pytest.raises(Refused, match="is not an artifact"):
        make(path, "new")
    assert (path / "chapter-1.tex").read_text() == "years of work"
    with pytest.raises(Refused, match="is not an artifact"):
        make(path / "chapter-1.tex", "new")


def test_a_path_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot be written"):
        make(tmp_path / "file" / "out", "new")


def test_a_number_that_is_not_finite_finishes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    said = r"details\.metrics\[1\]\.value is not a finite number"
    with pytest.raises(WorkFailed, match=said), write_artifact(spec_of(path)) as pending:
        pending.details = {"metrics": [{"value": 1.0}, {"value": float("nan")}]}
    assert not path.exists()


def test_finished_work_is_found_by_key_only_while_it_is_intact(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert find_finished(path, "key") is None
    make(path, "text", key="key")
    assert find_finished(path, "key") == read_finished(path, "engine")
    assert find_finished(path, "other") is None
    (path / "sub" / "payload.txt").write_text("texu")
    assert find_finished(path, "key") is None


def test_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "out", "text")
    with pytest.raises(Refused, match="of kind engine; quality-report is needed"):
        read_finished(tmp_path / "out", "quality-report")


@given(st.dictionaries(st.integers(0, 100), st.floats(allow_nan=False, allow_infinity=False), max_size=4))
def test_details_come_back_as_json_would_have_them(details: dict[int, float]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "out"
        with write_artifact(spec_of(path)) as pending:
            pending.details = {"per_layer": details, "shape": (1, 2)}
        expected = {"per_layer": {str(key): value for key, value in details.items()}, "shape": [1, 2]}
        assert read_manifest(path).details == expected
