"""The ladder of tries on a tiny model; where nothing else is said, a checkpoint stands in for the engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitsmith.compile import trusted_engines
from bitsmith.compile.compile_plan import CompileJob, CompilePlan, plan_compile
from bitsmith.core.artifact import ArtifactSpec, find_finished, read_finished, write_artifact
from bitsmith.core.cache import cache_dir
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import MANIFEST_NAME, Manifest, read_manifest, verify_files
from bitsmith.core.model_ref import source_digest
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import Verdict
from bitsmith.core.recipe import Recipe, load_recipe
from bitsmith.evaluate.job import artifact_spec
from bitsmith.evaluate.report import read_report
from bitsmith.pipeline import until_gate
from bitsmith.pipeline.main import main
from bitsmith.pipeline.until_gate import LadderPlan, climb, plan_ladder, publish
from bitsmith.quantize import job as job_module
from bitsmith.quantize.reread import check_digests, stored_digests
from bitsmith.quantize.sensitivity import SensitivityMeter

QUIET = Reporter(quiet=True)


def stand_in(job: CompileJob, plan: CompilePlan, reporter: Reporter) -> Manifest:
    finished = find_finished(job.out, plan.stage_key)
    if finished is not None:
        return finished
    with write_artifact(ArtifactSpec.of(job.out, "quantized-checkpoint", plan)) as pending:
        shutil.copytree(job.checkpoint, pending.partial, dirs_exist_ok=True)
        (pending.partial / MANIFEST_NAME).unlink()
    return read_finished(job.out, "quantized-checkpoint")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(until_gate, "compile_engine", stand_in)


@pytest.fixture(autouse=True)
def _reread_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        job_module,
        "reread_in_fresh_process",
        lambda checkpoint, expected: check_digests(stored_digests(checkpoint, expected), expected),
    )


@pytest.fixture
def recipe(recipe_path: Path) -> Recipe:
    return load_recipe(recipe_path)


def write_gate(tmp_path: Path, limit: float) -> Path:
    path = tmp_path / "gate.yaml"
    path.write_text(yaml.safe_dump({"kl_mean": {"max": limit}}))
    return path


def plan_with(recipe: Recipe, tmp_path: Path, limit: float) -> LadderPlan:
    return plan_ladder(recipe, write_gate(tmp_path, limit), tmp_path / "run", QUIET, accept_terms=False)


@pytest.mark.usefixtures("stand_ins")
def test_the_smallest_that_passes_is_published_with_all_tries(recipe: Recipe, tmp_path: Path) -> None:
    plan = plan_with(recipe, tmp_path, 0.02)
    assert plan.rungs[0] == 2.5 and plan.rungs[-1] == 8.5 and len(plan.rungs) == 25
    tries, best = climb(plan, QUIET)
    assert best is not None and best.passes and 2.5 < best.bits_budget < 8.5
    assert next(made.bits_budget for made in tries) == 5.5 and len(tries) <= 5
    smaller = [made for made in tries if made.bits_budget < best.bits_budget]
    assert max(made.bits_budget for made in smaller) == best.bits_budget - 0.25
    assert not any(made.passes for made in smaller) and all(made.reasons for made in smaller)
    sizes = [made.checkpoint_bytes for made in sorted(tries, key=lambda made: made.bits_budget)]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    assert all(made.bits <= made.bits_budget for made in tries)

    chain, report = publish(plan, tries, best, QUIET)
    root = plan.root
    for name in ("quantized", "engine", "report"):
        verify_files(root / name, read_manifest(root / name))
    assert read_manifest(root / "quantized").details["bit_plan"]["average_bits"] == best.bits
    assert not list((root / "tries").glob("*/quantized")) and not list((root / "tries").glob("*/engine"))
    assert len(list((root / "tries").glob("*/report"))) == len(tries)
    assert report.verdict is Verdict.PASS
    stored = read_report(root / "report")
    assert stored.details["ladder"] == [made.to_json() for made in tries]
    # What follows in a chain finds every stage finished.
    assert find_finished(root / "quantized", chain.quantize_plan.stage_key) is not None
    assert find_finished(root / "engine", plan_compile(chain.engine_job).stage_key) is not None
    digests = source_digest(root / "engine"), source_digest(chain.source.path)
    spec = artifact_spec(chain.evaluate_plan, *digests)
    assert find_finished(root / "report", spec.stage_key) is not None
    for name in ("report.md", "report.html"):
        text = (root / "report" / name).read_text()
        assert "Ladder of tries" in text
        assert all(f"{made.bits:.3f}" in text and str(made.verdict) in text for made in tries)


@pytest.mark.usefixtures("stand_ins")
def test_an_interrupted_ladder_goes_on_and_a_finished_one_is_not_redone(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(until_gate, "RUNG_BITS", 1.0)
    plan = plan_with(recipe, tmp_path, 0.02)
    measured: list[int] = []
    genuine_layer, genuine_try = SensitivityMeter._measure_layer, until_gate._try
    done: list[float] = []

    def measure(self: SensitivityMeter, index: int, *args: Any) -> Any:
        measured.append(index)
        return genuine_layer(self, index, *args)

    def interrupted(plan: LadderPlan, bits: float, reporter: Reporter) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(bits)
        return genuine_try(plan, bits, reporter)

    def counted(plan: LadderPlan, bits: float, reporter: Reporter) -> Any:
        done.append(bits)
        return genuine_try(plan, bits, reporter)

    monkeypatch.setattr(SensitivityMeter, "_measure_layer", measure)
    monkeypatch.setattr(until_gate, "_try", interrupted)
    with pytest.raises(KeyboardInterrupt):
        climb(plan, QUIET)
    monkeypatch.setattr(until_gate, "_try", counted)
    tries, best = climb(plan_with(recipe, tmp_path, 0.02), QUIET)
    assert done == [made.bits_budget for made in tries] and len(set(done)) == len(done)
    assert measured == [0, 1], "what bits cost is measured once"
    publish(plan, tries, best, QUIET)
    before = {path: path.stat().st_mtime_ns for path in plan.root.rglob(MANIFEST_NAME)}
    again = climb(plan_with(recipe, tmp_path, 0.02), QUIET)
    publish(plan, *again, QUIET)
    assert again == (tries, best) and len(done) == len(tries)
    assert {path: path.stat().st_mtime_ns for path in plan.root.rglob(MANIFEST_NAME)} == before
    # Another gate is another ladder.
    assert climb(plan_with(recipe, tmp_path, 0.5), QUIET)[0] != tries


@pytest.mark.usefixtures("stand_ins")
def test_where_nothing_passes_only_a_report_is_published(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(until_gate, "RUNG_BITS", 4.0)
    gate, runs = write_gate(tmp_path, 1e-9), tmp_path / "runs"
    code = main(["run", str(recipe_path), "--runs", str(runs), "--until-gate", str(gate), "--json"])
    captured = capsys.readouterr()
    assert code == 1
    document = json.loads(captured.out)
    assert document["verdict"] == "FAIL" and document["bits_budget"] is None
    assert [made["verdict"] for made in document["ladder"]] == ["FAIL", "FAIL"]
    assert {path.name for path in (runs / "tiny").iterdir() if path.is_dir()} == {"tries", "report"}
    report = read_report(runs / "tiny" / "report")
    assert report.verdict is Verdict.FAIL and len(report.details["ladder"]) == 2
    assert "nothing is published but the report" in captured.err
    assert "the recipe's own is not used" in captured.err


def test_a_real_engine_that_passes_is_compiled_judged_and_served(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(until_gate, "RUNG_BITS", 4.5)
    # The process that serves reads the user's own list of engines, whatever tests before this one use.
    monkeypatch.setattr(trusted_engines, "cache_dir", cache_dir)
    gate, runs = write_gate(tmp_path, 1.0), tmp_path / "runs"
    code = main(["run", str(recipe_path), "--runs", str(runs), "--until-gate", str(gate), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document = json.loads(captured.out)
    assert document["verdict"] == "PASS" and document["bits_budget"] == 4.5
    assert document["served"] and "int4 weights (group 32)" in document["engine"]
    assert read_manifest(runs / "tiny" / "engine").kind == "engine"
    assert read_report(runs / "tiny" / "report").details["ladder"] == document["ladder"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bits_budget": 4.0}, r"quantize\.bits_budget is 4\.0, and --until-gate"),
        ({"size_budget": "90MB"}, r"quantize\.size_budget is 90MB, and --until-gate"),
        ({"scheme": "w8a8-fp8", "group_size": "auto"}, "has none to choose from"),
        ({"format": "gptq", "kv_cache": "none"}, "one width for all modules"),
    ],
)
def test_recipes_that_leave_nothing_to_look_for_are_refused(
    settings: dict[str, Any], named: str, recipe_path: Path, tmp_path: Path
) -> None:
    body = yaml.safe_load(recipe_path.read_text())
    body["quantize"] |= settings
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(body))
    with pytest.raises(Refused, match=named):
        plan_with(load_recipe(path), tmp_path, 0.5)
    assert not (tmp_path / "run").exists()


def test_a_broken_gate_is_refused_before_any_try(recipe: Recipe, tmp_path: Path) -> None:
    gate = tmp_path / "gate.yaml"
    gate.write_text("kl_men: {max: 0.1}\n")
    with pytest.raises(Refused, match="kl_men"):
        plan_ladder(recipe, gate, tmp_path / "run", QUIET, accept_terms=False)
    assert not (tmp_path / "run").exists()
