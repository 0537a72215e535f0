"""`bitsmith convert` and `quantize --format`, from the command line."""

import json
from pathlib import Path

import pytest

from bitsmith.core.progress import Reporter
from bitsmith.core.recipe import load_recipe
from bitsmith.pipeline.contenders import find_contender, open_contender
from bitsmith.pipeline.main import main
from bitsmith.quantize import conversion, job


@pytest.fixture(autouse=True)
def _no_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job, conversion):
        monkeypatch.setattr(module, "reread_in_fresh_process", lambda checkpoint, expected: None)


def document(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert isinstance(body, dict)
    return body


def test_quantized_as_awq_converted_and_not_done_twice(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    awq, gptq = str(tmp_path / "awq"), str(tmp_path / "gptq")
    scheme = ["--scheme", "w4a16-rtn", "--group-size", "32"]
    body = document(capsys, ["quantize", str(tiny_model), *scheme, "--format", "awq", "--out", awq])
    assert body["config"]["format"] == "awq"  # type: ignore[index]
    convert = ["convert", awq, "--format", "gptq", "--out", gptq]
    first = document(capsys, convert)
    assert (first["path"], first["notes"]) == (gptq, [])
    made_at = json.loads((tmp_path / "gptq" / "manifest.json").read_text())["made_at"]
    assert document(capsys, convert)["content_digest"] == first["content_digest"]
    assert json.loads((tmp_path / "gptq" / "manifest.json").read_text())["made_at"] == made_at
    assert main(["inspect", gptq, "--verify"]) == 0


def test_an_evaluation_says_that_a_label_was_wrong(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "gptq"
    scheme = ["--scheme", "w4a16-rtn", "--group-size", "32"]
    assert main(["quantize", str(tiny_model), *scheme, "--format", "gptq", "--out", str(out)]) == 0
    (out / "manifest.json").unlink()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (out / "config.json").write_text(json.dumps(config))
    source = find_contender(str(out), Reporter(quiet=True), accept_terms=False)
    contender = open_contender(source, generates=False, trust_engine=False)
    assert "is labelled 'gptq_v2', but its values are those of 'gptq'" in contender.facts["notes"]


def test_a_checkpoint_that_has_no_other_format_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(tiny_model), "--format", "awq", "--out", str(out), "--json"]) == 2
    assert "no integer weights" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not out.exists()


def test_modelopt_has_a_format_of_its_own(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["quantize", str(tiny_model), "--scheme", "w8a8-fp8", "--backend", "modelopt"]
    arguments += ["--format", "compressed-tensors", "--out", str(tmp_path / "out"), "--json"]
    assert main(arguments) == 2
    assert "writes ModelOpt's own" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_recipe_names_the_format(tmp_path: Path) -> None:
    path = tmp_path / "awq.yaml"
    path.write_text("version: 1\nmodel: smollm2-135m\nquantize: {scheme: w4a16-awq, format: awq}\n")
    assert load_recipe(path).quantize.format == "awq"
