"""`bitsmith quantize --backend`: refusals come before anything is fetched, and are one sentence."""

import json
from pathlib import Path

import pytest

from bitsmith.core import model_ref
from bitsmith.pipeline.main import main


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
