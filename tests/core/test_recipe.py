"""A recipe is understood to its last key, or refused with all that is wrong with it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bitsmith.core.errors import Refused
from bitsmith.core.recipe import load_recipe
from bitsmith.core.recipe_sections import Recipe

FULL = """
version: 1
name: night-run
model: smollm2-135m
quantize:
  scheme: w4a16-rtn
  group_size: 64
  symmetric: false
  act_order: true
  kv_cache: fp8
  bits_budget: 4.25
  calibration: {source: hf:org/set, num_samples: 4, seq_len: 32, seed: 7}
compile:
  target: cpu
  kv_cache: bf16
  activations: fp32
  max_batch_size: 8
  max_num_tokens: 256
  max_model_len: 1024
  kv_scale: ones
  num_threads: 2
evaluate:
  suite: quick
  source: hf:org/other
  num_windows: 8
  seq_len: 64
  tasks: [arc_easy, piqa]
  gate: {kl_mean: {max: 0.2}}
serve: {speculate: ngram, host: 0.0.0.0, port: 0}
"""


def assert_holds(found: dict[str, Any], given: dict[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, dict) and key != "gate":
            assert_holds(found[key], value)
        else:
            assert found[key] == (tuple(value) if isinstance(value, list) else value), key


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "recipe.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_every_field_of_a_file_reaches_the_recipe(write: Any) -> None:
    assert_holds(dataclasses.asdict(load_recipe(write(FULL))), yaml.safe_load(FULL))


def test_every_field_has_a_default_but_version_and_model(write: Any) -> None:
    recipe = load_recipe(write("version: 1\nmodel: smollm2-135m\n", name="my-run.yaml"))
    assert recipe.name == "my-run"
    assert recipe == Recipe(version=1, name="my-run", model="smollm2-135m")
    assert recipe.quantize.calibration.num_samples == 128


@pytest.mark.parametrize("path", sorted(Path("examples").glob("*.yaml")), ids=str)
def test_the_examples_are_recipes(path: Path) -> None:
    if "version" in yaml.safe_load(path.read_text()):
        assert load_recipe(path).name == path.stem


def test_paths_are_taken_from_the_recipes_directory(write: Any, tmp_path: Path) -> None:
    text = """
        version: 1
        model: ./model
        quantize: {backend: modelopt, backend_python: bin/python, calibration: {source: data/c.jsonl}}
        evaluate: {source: /data/e.txt, gate: gate.yaml}
    """
    recipe = load_recipe(write(text))
    assert recipe.model == str(tmp_path / "model")
    assert recipe.quantize.calibration.source == str(tmp_path / "data" / "c.jsonl")
    assert recipe.quantize.backend_python == str(tmp_path / "bin" / "python")
    assert (recipe.evaluate.source, recipe.evaluate.gate) == ("/data/e.txt", str(tmp_path / "gate.yaml"))
    assert load_recipe(write("version: 1\nmodel: hf:org/name")).model == "hf:org/name"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("groups: 3", "groups: unknown key. Valid keys: version, name, model, quantize, compile, evaluate,"),
        ("quantize: {groupsize: 3}", "quantize.groupsize: unknown key. Valid keys: scheme, group_size,"),
        ("quantize: {calibration: {n: 3}}", "quantize.calibration.n: unknown key. Valid keys: source,"),
        ("quantize: {group_size: big}", "quantize.group_size: 'big' is not accepted. Give an integer of at "),
        ("quantize: {group_size: big}", "least 1 or 'auto' or 'channel'."),
        ("quantize: {group_size: 0}", "quantize.group_size: 0 is not accepted."),
        ("quantize: {group_size: 64.5}", "quantize.group_size: 64.5 is not accepted."),
        ("quantize: {symmetric: 1}", "quantize.symmetric: 1 is not accepted. Give true or false."),
        ("quantize: {calibration: {seed: '3'}}", "seed: '3' is not accepted. Give an integer of at least 0."),
        ("quantize: {bits_budget: 0}", "quantize.bits_budget: 0 is not accepted. Give a number above 0."),
        ("quantize: {size_budget: 90}", "quantize.size_budget: 90 is not accepted. Give text, not empty."),
        ("quantize: 3", "quantize: 3 is not accepted. Give a mapping."),
        ("quantize:", "quantize: None is not accepted. Give a mapping."),
        ("compile: {target: cuda}", "compile.target: 'cuda' is not accepted. Give 'cpu'."),
        ("compile: {kv_cache: int4}", "Give 'auto' or 'fp8' or 'int8' or 'bf16' or 'fp32'."),
        ("evaluate: {tasks: piqa}", "evaluate.tasks: 'piqa' is not accepted. Give a list, each entry text,"),
        ("evaluate: {gate: 3}", "evaluate.gate: 3 is not accepted. Give a mapping or text, not empty."),
        ("serve: {port: 70000}", "70000 is not accepted. Give an integer of at least 0 and at most 65535."),
        ("name: a/b", "name: 'a/b' is not accepted."),
        ("name: ..", "name: '..' is not accepted."),
    ],
)
def test_a_mistake_is_named_with_what_may_stand_there(section: str, said: str, write: Any) -> None:
    with pytest.raises(Refused) as error:
        load_recipe(write(f"version: 1\nmodel: m\n{section}\n"))
    assert said in str(error.value)
    assert "recipe.yaml is not a valid recipe" in str(error.value)


def test_all_mistakes_are_told_at_once(write: Any) -> None:
    with pytest.raises(Refused) as error:
        load_recipe(write("version: 2\nserve: {port: x, speculate: draft}\nquantise: {}\n"))
    lines = str(error.value).splitlines()[1:]
    assert sorted(line.split(":")[0].strip() for line in lines) == [
        "model", "quantise", "serve.port", "serve.speculate", "version",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 1\nmodel: a\nversion: 1\n", "line 3: key 'version' is given twice \\(first in line 1\\)"),
        ("version: 1\nmodel: a\nserve:\n  port: 1\n  port: 2\n", "line 5: key 'port' is given twice"),
        ("", "must hold a mapping"),
        ("- a\n", "must hold a mapping"),
        ("a: [\n", "not valid YAML"),
        ("version: 1\nmodel: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("version: 1\nmodel: 2020-01-01\n", "no text, number, list or mapping"),
        ("version: 1\nmodel: m\nquantize: {scheme: w3}\n", "Unknown scheme 'w3'. Valid schemes: w2a16-gptq"),
    ],
)
def test_files_that_are_no_recipes_are_refused(text: str, said: str, write: Any) -> None:
    with pytest.raises(Refused, match=said):
        load_recipe(write(text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"none\.yaml cannot be read: No such file"):
        load_recipe(tmp_path / "none.yaml")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(["version", "name", "model", "quantize", "compile", "evaluate", "serve", "x"])


@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_any_mapping_is_a_recipe_or_refused(
    tmp_path_factory: pytest.TempPathFactory, body: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(body))
    try:
        recipe = load_recipe(path)
    except Refused:
        return
    assert recipe.version == 1
    assert recipe.model
