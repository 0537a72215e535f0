"""House rules that a machine can check: which stage may import which, and what is never called."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("core", "quantize", "compile", "ops", "evaluate", "serve", "pipeline")

# core ◀ quantize ◀ compile ◀ {evaluate, serve} ◀ pipeline; compile, evaluate and serve use ops.
MAY_IMPORT = {
    "core": {"core"},
    "ops": {"core", "ops"},
    "quantize": {"core", "quantize"},
    "compile": {"core", "quantize", "ops", "compile"},
    "evaluate": {"core", "quantize", "ops", "compile", "evaluate"},
    "serve": {"core", "quantize", "ops", "compile", "serve"},
    "pipeline": set(STAGES),
}
FILES = sorted(path for stage in STAGES for path in (ROOT / stage).glob("**/*.py"))
MAX_LINES = 300

NEVER_IMPORTED = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
NEVER_CALLED = {
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.load",
    "os.system",
    "os.popen",
}
NEVER_TRUE = {"trust_remote_code", "shell", "allow_pickle"}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which stage they reach"
            yield node.module or ""


def forbidden_uses(tree: ast.AST) -> Iterator[str]:
    for name in imported_modules(tree):
        if name.split(".")[0] in NEVER_IMPORTED:
            yield f"import {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in NEVER_CALLED or called in {"eval", "exec"}:
            yield called
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in NEVER_TRUE and not is_false:
                yield f"{called}({keyword.arg}={ast.unparse(keyword.value)})"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_keeps_the_rules(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    stage = path.relative_to(ROOT).parts[0]
    reached = {name.split(".")[1] for name in imported_modules(tree) if name.startswith("bitsmith.")}
    assert reached <= MAY_IMPORT[stage], f"{stage} may not import {sorted(reached - MAY_IMPORT[stage])}"
    assert list(forbidden_uses(tree)) == []
    assert ast.get_docstring(tree), "a module says what it does and does not know"
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_folder_is_flat_and_shadows_nothing(stage: str) -> None:
    """A nested folder would be missing from the wheel; an __init__.py would make `evaluate` ours."""
    names = [path.relative_to(ROOT / stage).as_posix() for path in (ROOT / stage).glob("**/*.py")]
    assert [name for name in names if "/" in name or name == "__init__.py"] == []
    assert [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names] == []
    assert (ROOT / stage / "py.typed").is_file()
    assert not (ROOT / "bitsmith").exists()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", ["import pickle"]),
        ("from torch import nn\ntorch.load(p)", ["torch.load"]),
        ("yaml.load(s, Loader=yaml.SafeLoader)", ["yaml.load"]),
        ("f(trust_remote_code=True)", ["f(trust_remote_code=True)"]),
        ("f(trust_remote_code=wanted)", ["f(trust_remote_code=wanted)"]),
        ("f(trust_remote_code=False)", []),
        ("subprocess.run(c, shell=True)", ["subprocess.run(shell=True)"]),
        ("yaml.safe_load(s)", []),
    ],
)
def test_the_rules_catch_what_they_are_for(code: str, found: list[str]) -> None:
    assert list(forbidden_uses(ast.parse(code))) == found
