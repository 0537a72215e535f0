"""TensorRT-LLM from the command line, on a machine that has none of its tools."""

import json
from pathlib import Path

import pytest

from bitsmith.pipeline.main import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    exit_code = main([*arguments, "--json"])
    return exit_code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("target", ["tensorrt-llm", "tensorrt-llm-pytorch"])
def test_an_export_is_said_to_be_one_and_passes_the_validator(
    target: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "export"
    exit_code, document = run_json(capsys, "compile", str(tiny_model), "--target", target, "--out", str(out))
    assert exit_code == 0, document
    details = document["details"]
    assert isinstance(details, dict)
    assert details["state"] == "exported"
    check = ("inspect", str(out), "--against", target, "--source")
    exit_code, report = run_json(capsys, *check, str(tiny_model))
    assert exit_code == 0, report
    exit_code, report = run_json(capsys, *check, "nosuch")
    assert exit_code == 2
    assert "demo model" in str(report["error"])  # a source is named as any model is


def test_options_that_would_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["--source", "smollm2-135m"], ["--accept-terms"]):
        exit_code, report = run_json(capsys, "inspect", str(tmp_path), *option)
        assert exit_code == 2
        assert f"{option[0]} applies to" in str(report["error"])


def test_an_engine_that_cannot_be_built_here_is_refused_before_work(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine"
    arguments = ("--target", "tensorrt-llm", "--require-engine", "--out", str(out))
    exit_code, document = run_json(capsys, "compile", str(tiny_model), *arguments)
    assert exit_code == 2
    assert "trtllm-build" in str(document["error"])
    assert not out.exists()


@pytest.mark.parametrize(
    ("target", "option"),
    [
        ("cpu", ["--tensor-parallel", "2"]),
        ("cpu", ["--triton", "somewhere"]),
        ("tensorrt-llm", ["--activations", "int8"]),
        ("tensorrt-llm", ["--num-threads", "2"]),
        ("tensorrt-llm", ["--max-draft-len", "2"]),
        ("tensorrt-llm", ["--build-flag", "novalue"]),
    ],
)
def test_an_option_of_another_target_is_refused_by_name(
    target: str, option: list[str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine"
    arguments = ("compile", str(tiny_model), "--target", target, "--out", str(out), *option)
    exit_code, document = run_json(capsys, *arguments)
    assert exit_code == 2
    assert option[0] in str(document["error"])
    assert not out.exists()
