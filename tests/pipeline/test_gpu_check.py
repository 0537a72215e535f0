"""The GPU check: what was not run is said so, a killed check goes on, and the exit code tells it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.pipeline.gpu_check import Step, exit_code, run_steps
from bitsmith.pipeline.main import main

QUIET = Reporter(quiet=True)


class Script:
    """Steps a, b (needs a), c (needs b), whose outcome is set by name; counts the runs."""

    def __init__(self, **outcomes: BaseException) -> None:
        self.outcomes, self.ran = outcomes, list[str]()

    def steps(self) -> list[Step]:
        needs = {"a": (), "b": ("a",), "c": ("b",)}
        return [Step(name, needs[name], self._runner(name)) for name in needs]

    def _runner(self, name: str) -> Any:
        def run(left_s: float, found: Mapping[str, Any]) -> Mapping[str, Any]:
            self.ran.append(name)
            if name in self.outcomes:
                raise self.outcomes[name]
            return {"value": name}

        return run


def statuses(script: Script, out: Path, machine: str = "m", **options: float) -> list[str]:
    return [result.status for result in run_steps(script.steps(), out, machine, QUIET, **options)]


def test_everything_passes(tmp_path: Path) -> None:
    results = run_steps(Script().steps(), tmp_path, "m", QUIET)
    assert exit_code(results) == 0
    body = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [step["found"] for step in body["steps"]] == [{"value": name} for name in "abc"]
    assert (tmp_path / "gpu-check.md").read_text().count("passed") == 3


def test_failure_and_what_depends_on_it(tmp_path: Path) -> None:
    results = run_steps(Script(b=WorkFailed("broken | pipe")).steps(), tmp_path, "m", QUIET)
    assert [result.status for result in results] == ["passed", "failed", "not run"]
    assert exit_code(results) == 4
    assert "needs b" in results[2].reason
    assert "| b | failed | 0.0 | broken / pipe |" in (tmp_path / "gpu-check.md").read_text()


def test_killed_check_goes_on_where_it_was(tmp_path: Path) -> None:
    killed = Script(b=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_steps(killed.steps(), tmp_path, "m", QUIET)
    again = Script()
    assert statuses(again, tmp_path) == ["passed"] * 3
    assert again.ran == ["b", "c"]
    elsewhere = Script()
    statuses(elsewhere, tmp_path, machine="another")
    assert elsewhere.ran == ["a", "b", "c"]


def test_time_limit_leaves_the_rest_not_run(tmp_path: Path) -> None:
    script = Script()
    results = run_steps(script.steps(), tmp_path, "m", QUIET, limit_s=0)
    assert [result.status for result in results] == ["not run"] * 3
    assert exit_code(results) == 2
    assert "time limit" in results[0].reason
    assert script.ran == []


def test_damaged_state_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "gpu-check.json").write_text('{"machine": "m", "steps": [{"name": "a"}]}')
    assert statuses(Script(a=Refused("no GPU")), tmp_path) == ["not run"] * 3


def test_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert main(["doctor", "--gpu", "--out", str(tmp_path / "out"), "--json"]) == 2
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert len(steps) == 7
    assert {step["status"] for step in steps} == {"not run"}
    assert all(step["reason"] for step in steps)
    assert "nvidia-smi is not on PATH" in steps[0]["reason"]
    assert json.loads((tmp_path / "out" / "gpu-check.json").read_text())["steps"] == steps
    assert main(["doctor", "--out", str(tmp_path / "x")]) == 2
    assert "--gpu" in capsys.readouterr().err
