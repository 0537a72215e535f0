"""The folder `evaluate/` must never become a module called `evaluate`: lm-eval imports another one."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_evaluate_at_the_root_is_hugging_faces() -> None:
    code = "import evaluate; evaluate.load; print(evaluate.__file__)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not Path(result.stdout.strip()).is_relative_to(ROOT / "evaluate")


def test_each_stage_is_imported_from_its_folder() -> None:
    code = "import bitsmith.core.errors, bitsmith.evaluate; print(bitsmith.core.errors.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "core/errors.py" in result.stdout


def test_what_tests_and_users_need_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        requirement.split("[")[0].split(">")[0].split("=")[0].strip()
        for requirement in project["dependencies"]
    }
    assert {
        "torch",
        "transformers",
        "safetensors",
        "gguf",
        "pydantic",
        "filelock",
        "lm-eval",
        "datasets",
    } <= names
    pins = (ROOT / "constraints.txt").read_text()
    assert "evaluate==" in pins  # lm-eval's requirement, and the module the folder must not hide
