"""The whole chain on a tiny model, as a user runs it: once, again, and with a gate that says no."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitsmith.core.manifest import read_manifest, verify_files

STAGES = {"quantized": "quantized-checkpoint", "engine": "engine", "report": "quality-report"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def run_chain(recipe: Path, runs: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON document, and what a person read. A process of its own, as a user starts it."""
    command = [
        sys.executable,
        "-m",
        "bitsmith.pipeline.main",
        "run",
        str(recipe),
        "--runs",
        str(runs),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_chain_leaves_verified_artifacts_and_says_what_it_came_to(recipe_path: Path, runs: Path) -> None:
    exit_code, document, said = run_chain(recipe_path, runs)
    assert exit_code == 0
    assert document["verdict"] == "PASS"
    for key in ("size_bytes", "perplexity", "decode_tokens_per_s"):
        assert set(document[key]) == {"baseline", "engine"}
        assert all(value > 0 for value in document[key].values())
    assert Path(document["report"]).is_file()
    assert "fallback" in said
    assert f"bitsmith serve {runs / 'tiny' / 'engine'} --speculate ngram" in said
    for name, kind in STAGES.items():
        manifest = read_manifest(runs / "tiny" / name)
        assert manifest.kind == kind
        verify_files(runs / "tiny" / name, manifest)
    report = json.loads((runs / "tiny" / "report" / "report.json").read_text())
    titles = [report["provenance"][role]["title"] for role in ("candidate", "baseline")]
    assert titles == ["tiny, w8a16-gptq, group size 32, symmetric, act order", "tiny"]
    parents = read_manifest(runs / "tiny" / "engine").parents
    assert parents == {"checkpoint": read_manifest(runs / "tiny" / "quantized").content_digest}


def test_a_second_run_redoes_nothing_and_says_so(recipe_path: Path, runs: Path) -> None:
    before = {name: (runs / "tiny" / name / "manifest.json").read_bytes() for name in STAGES}
    exit_code, document, said = run_chain(recipe_path, runs)
    assert exit_code == 0
    assert document["verdict"] == "PASS"
    assert said.count("nothing redone") + said.count("nothing is redone") == 5
    assert {name: (runs / "tiny" / name / "manifest.json").read_bytes() for name in STAGES} == before


def test_a_stricter_gate_fails_the_same_engine_without_compiling_again(recipe_path: Path, runs: Path) -> None:
    recipe = yaml.safe_load(recipe_path.read_text())
    recipe["evaluate"]["gate"] = {"kl_mean": {"max": 1e-12, "reason": "nothing may change"}}
    strict = recipe_path.with_name("strict.yaml")
    strict.write_text(yaml.safe_dump(recipe | {"name": "tiny"}))
    engine = (runs / "tiny" / "engine" / "manifest.json").read_bytes()
    exit_code, document, said = run_chain(strict, runs)
    assert exit_code == 1
    assert document["verdict"] == "FAIL"
    assert document["served"] == ""
    assert "kl_mean ≤ 1e-12" in said
    assert (runs / "tiny" / "engine" / "manifest.json").read_bytes() == engine


def test_a_recipe_that_cannot_end_well_is_refused_before_anything_is_written(
    recipe_path: Path, tmp_path: Path
) -> None:
    recipe = yaml.safe_load(recipe_path.read_text())
    broken = {
        "does not divide": {"quantize": recipe["quantize"] | {"group_size": 24}},
        "kv_cache": {
            "quantize": recipe["quantize"] | {"kv_cache": "none"},
            "compile": recipe["compile"] | {"kv_cache": "fp8"},
        },
        "kv_cache is int8": {
            "quantize": recipe["quantize"] | {"kv_cache": "none"},
            "compile": recipe["compile"] | {"kv_cache": "int8"},
        },
        "at least 384": {"compile": recipe["compile"] | {"max_model_len": 300}},
        "unknown metric": {"evaluate": recipe["evaluate"] | {"gate": {"kl_men": {"max": 1}}}},
        "Valid keys": {"compile": recipe["compile"] | {"batch": 3}},
    }
    for index, (words, sections) in enumerate(broken.items()):
        path = tmp_path / f"broken{index}.yaml"
        path.write_text(yaml.safe_dump(recipe | sections))
        exit_code, document, _ = run_chain(path, tmp_path / "runs")
        assert exit_code == 2, words
        assert words in document["error"]["message"], document
        assert not list((tmp_path / "runs").glob("*/*")), words
