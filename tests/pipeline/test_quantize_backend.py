"""`bitsmith quantize --backend`: refusals come before anything is fetched, and are one sentence."""

import json
from pathlib import Path

import pytest

from bitsmith.core import model_ref
from bitsmith.core.recipe_sections import QuantizeSection
from bitsmith.pipeline.chain import choose_recipe_backend
from bitsmith.pipeline.main import main
from bitsmith.quantize.modelopt_backend import ModelOptBackend
from bitsmith.quantize.modelopt_environment import ModelOptEnvironment


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--scheme", "w4a16-gptq", "--backend", "modelopt"],
            "It does w8a8-fp8, w8a8-fp8-dynamic",
        ),
        (["--scheme", "w8a8-fp8", "--backend", "modelopt", "--refine"], "--backend modelopt with --refine"),
        (["--scheme", "w8a8-fp8", "--backend-python", "/x/python"], "belongs to --backend modelopt"),
        (["--scheme", "w8a16-rtn", "--backend", "modelopt", "--seed", "1"], "calibrates nothing"),
    ],
)
def test_a_refusal_fetches_no_model(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(model_ref, "fetch_snapshot")
    out = tmp_path / "out"
    assert main(["quantize", "hf:somebody/model", "--out", str(out), "--json", *arguments]) == 2
    assert named in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not out.exists()


def test_an_unknown_backend_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["quantize", "m", "--scheme", "w8a8-fp8", "--out", "o", "--backend", "other"])
    assert exit_info.value.code == 2
    assert "bitsmith, modelopt" in capsys.readouterr().err.replace("'", "")


@pytest.mark.parametrize(
    ("quantize", "named"),
    [
        ("backend: modelopt, scheme: w4a16-gptq", "It does w8a8-fp8"),
        ("backend: modelopt, scheme: w4a16-awq", "the native engine does not apply"),
        ("backend_python: bin/python", "belongs to --backend modelopt"),
        ("backend: llama", "'bitsmith' or 'modelopt'"),
    ],
)
def test_a_recipe_is_refused_before_its_model_is_fetched(
    quantize: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(model_ref, "fetch_snapshot")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: 1\nmodel: hf:somebody/model\nquantize: {{{quantize}}}\n")
    assert main(["run", str(recipe), "--runs", str(tmp_path / "runs"), "--json"]) == 2
    assert named in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_recipe_runs_modelopt_in_the_python_that_it_names() -> None:
    section = QuantizeSection(scheme="w8a8-fp8", backend="modelopt", backend_python="/opt/python")
    backend = choose_recipe_backend(section)
    assert backend == ModelOptBackend(ModelOptEnvironment(Path("/opt/python")))
    assert not backend.can_resume and choose_recipe_backend(QuantizeSection()).can_resume
