"""The program from outside: exit codes, one JSON document, errors that name the valid choices."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bitsmith.ops.isa import cpu_flags, fastest_form
from bitsmith.pipeline.main import COMMANDS, main


def run_program(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bitsmith.pipeline.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_lists_every_command_and_the_exit_codes() -> None:
    done = run_program("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert name in done.stdout
    assert "3 the gate says INCONCLUSIVE" in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(("chosen", "expected"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_waits_of_openmp_are_bounded_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], expected: str
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["GOMP_SPINCOUNT"] == expected


def test_an_unknown_command_is_refused_with_the_list() -> None:
    done = run_program("quantise")
    assert done.returncode == 2
    assert "quantize" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_prints_one_json_document() -> None:
    done = run_program("models", "--json")
    assert done.returncode == 0
    assert [model["name"] for model in json.loads(done.stdout)["models"]] == ["smollm2-135m", "gemma3-270m"]


def test_an_error_is_one_json_document_too(tmp_path: Path) -> None:
    done = run_program("inspect", str(tmp_path), "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == 2
    assert "manifest.json" in error["message"]
    assert "Traceback" not in done.stderr


def test_doctor_looks_at_everything_and_succeeds() -> None:
    done = run_program("doctor", "--json")
    assert done.returncode == 0
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["status"] == "ok"
    assert findings["C++ compiler"]["found"]
    assert f"operators in their {fastest_form(cpu_flags())} form" in findings["processor"]["found"]


def test_an_unknown_scheme_lists_the_valid_ones(tmp_path: Path) -> None:
    done = run_program("quantize", str(tmp_path), "--scheme", "w5a16-gptq", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "w4a16-gptq" in done.stderr
    assert not (tmp_path / "out").exists()


def test_json_before_the_command_is_not_mistaken_for_it() -> None:
    done = run_program("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("bitsmith ")


def test_a_usage_error_is_one_json_document_too() -> None:
    done = run_program("gate", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["exit_code"] == 2
    assert "required" in done.stderr


def test_a_fault_of_ours_is_no_verdict_of_a_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("bitsmith.pipeline.command_models.run", fail)
    assert main(["models", "--json"]) == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["kind"] == "Unexpected"
    assert "a bug" in captured.err


REFUSALS = (
    (("--seed", "99999999999999999999999"), "calibration.seed"),
    (("--scheme", "w4a16-rtn", "--num-samples", "5"), "calibrates nothing"),
    (("--out", ""), "does not name a directory"),
    (("--bits-budget", "1.5"), "cannot be met: with 2 bits, group 32"),
    (("--size-budget", "10kB"), "and its weight files 0."),
    (("--size-budget", "small"), "90MB or 4.2GB"),
    (("--bits-budget", "4", "--for", "tensorrt-llm"), "one width for all modules"),
    (("--bits-budget", "4", "--format", "gptq"), "one width for all modules"),
    (("--bits-budget", "4", "--scheme", "w8a8-fp8"), "has none to choose from"),
)


@pytest.mark.parametrize(("arguments", "sentence"), REFUSALS)
def test_quantize_refuses_in_one_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out")
    assert main(["quantize", str(tiny_model), "--scheme", "w4a16-gptq", "--out", out, *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in " ".join(said.split())
    assert "Traceback" not in said


def test_the_snippet_of_the_readme_names_the_model_as_the_server_does() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    served = re.findall(r"^\$ bitsmith serve (\S+)", readme, flags=re.MULTILINE)
    assert served
    assert {Path(path).name for path in served} == set(re.findall(r'model="([^"]+)"', readme))
