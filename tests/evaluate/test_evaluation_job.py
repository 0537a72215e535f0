"""One evaluation from settings to artifact: verdicts, refusals before work, a report judged again."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bitsmith.core.artifact import find_finished, read_finished
from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.core.manifest import verify_files
from bitsmith.core.progress import Reporter
from bitsmith.core.quality import Verdict
from bitsmith.core.text_source import TextSource
from bitsmith.evaluate.contender import Contender
from bitsmith.evaluate.job import EvaluateJob, artifact_spec, evaluate_quality, plan_evaluate, regate
from bitsmith.evaluate.quick_suite import QuickSettings
from bitsmith.evaluate.report import read_report
from bitsmith.evaluate.task_files import TaskSettings

QUICK = QuickSettings(num_windows=6, seq_len=48, num_cloze_items=40)
GATE = {
    "perplexity_ratio": {"max": 1.2, "reason": "twice what peers lose"},
    "kl_mean": {"max": 0.25},
    "top1_agreement": {"min": 0.75},
    "cloze_accuracy_loss": {"max": 0.5, "blocking": False},
}


@pytest.fixture
def evaluate(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text: TextSource, reporter: Reporter
) -> Callable[..., Any]:
    def run(candidate: Any, baseline: Any, gate: Any = GATE, out: str = "report") -> Any:
        job = EvaluateJob(tmp_path / out, QUICK, None, gate)
        plan = plan_evaluate(job, tokenizer, text)
        first, second = (
            Contender(model, d * 64, tokenizer) for model, d in ((candidate, "c"), (baseline, "b"))
        )
        return evaluate_quality(plan, first, second, reporter)

    return run


def test_a_model_against_itself_passes_every_gate(
    evaluate: Callable[..., Any], logits_model: Callable[..., Any]
) -> None:
    report = evaluate(logits_model(), logits_model(batch_size=4), {"kl_mean": {"max": 1e-6}})
    assert report.verdict == Verdict.PASS
    values = {metric.name: metric.value for metric in report.metrics}
    assert values["kl_mean"] < 1e-6
    assert values["top1_agreement"] == 1.0
    assert values["perplexity_ratio"] == pytest.approx(1.0, abs=1e-6)


def test_a_worse_model_fails(evaluate: Callable[..., Any], favourites: Callable[..., Any]) -> None:
    report = evaluate(favourites(every=2), favourites())
    assert report.verdict == Verdict.FAIL
    verdicts = {outcome.metric: outcome.verdict for outcome in report.outcomes}
    assert verdicts["perplexity_ratio"] == Verdict.FAIL
    values = {metric.name: metric.value for metric in report.metrics}
    assert values["perplexity_ratio"] == pytest.approx(values["perplexity"] / values["baseline_perplexity"])
    assert values["cloze_logprob_drop"] > 0


def test_the_artifact_is_finished_complete_and_found_again(
    tmp_path: Path,
    evaluate: Callable[..., Any],
    favourites: Callable[..., Any],
    tokenizer: PreTrainedTokenizerFast,
    text: TextSource,
) -> None:
    report = evaluate(favourites(every=3), favourites())
    manifest = read_finished(tmp_path / "report", "quality-report")
    verify_files(tmp_path / "report", manifest)
    assert set(manifest.files) == {"report.json", "report.md", "report.html"}
    assert manifest.parents == {"candidate": "c" * 64, "baseline": "b" * 64}
    plan = plan_evaluate(EvaluateJob(tmp_path / "report", QUICK, None, GATE), tokenizer, text)
    key = artifact_spec(plan, "c" * 64, "b" * 64).stage_key
    assert find_finished(tmp_path / "report", key) is not None
    assert artifact_spec(plan, "b" * 64, "c" * 64).stage_key != key
    assert read_report(tmp_path / "report") == report


def test_the_same_evaluation_writes_the_same_bytes(
    tmp_path: Path, evaluate: Callable[..., Any], favourites: Callable[..., Any]
) -> None:
    for out in ("one", "two"):
        evaluate(favourites(every=3), favourites(), out=out)
    digests = [read_finished(tmp_path / out, "quality-report").content_digest for out in ("one", "two")]
    assert digests[0] == digests[1]


def test_a_report_is_judged_again_without_measuring(
    tmp_path: Path, evaluate: Callable[..., Any], favourites: Callable[..., Any]
) -> None:
    first = evaluate(favourites(every=2), favourites())
    assert first.verdict == Verdict.FAIL
    again = regate(tmp_path / "report", {"kl_mean": {"max": 100.0}})
    assert again.verdict == Verdict.PASS
    assert list(again.metrics) == list(first.metrics)
    assert regate(tmp_path / "report", GATE).outcomes == first.outcomes
    with pytest.raises(Refused, match="Did you mean kl_mean"):
        regate(tmp_path / "report", {"kl_maen": {"max": 100.0}})


def test_a_changed_report_is_not_judged(
    tmp_path: Path, evaluate: Callable[..., Any], favourites: Callable[..., Any]
) -> None:
    evaluate(favourites(every=2), favourites())
    path = tmp_path / "report" / "report.json"
    path.write_text(path.read_text().replace('"FAIL"', '"PASS"', 1))
    with pytest.raises(Refused, match=r"report.json does not match its SHA-256"):
        regate(tmp_path / "report", GATE)


def test_nan_fails_and_reads_back_as_nan(
    tmp_path: Path, evaluate: Callable[..., Any], favourites: Callable[..., Any]
) -> None:
    broken = favourites()
    broken.lead = math.nan
    report = evaluate(broken, favourites())
    assert report.verdict == Verdict.FAIL
    assert {o.verdict for o in report.outcomes} == {Verdict.FAIL}
    body = json.loads((tmp_path / "report" / "report.json").read_text(), parse_constant=pytest.fail)
    assert {m["value"] for m in body["metrics"] if m["name"] == "kl_mean"} == {None}
    assert regate(tmp_path / "report", GATE).verdict == Verdict.FAIL


def test_an_unrepeatable_baseline_ends_the_run_and_leaves_nothing(
    tmp_path: Path, evaluate: Callable[..., Any], logits_model: Callable[..., Any]
) -> None:
    with pytest.raises(WorkFailed, match="differs from itself"):
        evaluate(logits_model(), logits_model(noise=0.1))
    assert not (tmp_path / "report").exists()
    assert not (tmp_path / "report.partial").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quick": QuickSettings(num_windows=10**5, seq_len=48)},
            "100000 were asked for",
        ),
        ({"quick": QuickSettings(6, 48, 10**6)}, "passages fit for the cloze task"),
        ({"quick": QuickSettings(1, 48, 20)}, "no error can be estimated"),
        ({"gate": {"kl_meen": {"max": 1}}}, "unknown metric"),
        ({"gate": {"choice_acc_loss": {"max": 1}}}, "unknown metric"),  # a task that is not run
        ({"quick": None}, "Nothing to measure"),
        ({"tasks": TaskSettings(("no_such.yaml",))}, "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_any_model_is_needed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text: TextSource, change: dict[str, Any], message: str
) -> None:
    job = replace(EvaluateJob(tmp_path / "report", QUICK, None, GATE), **change)
    with pytest.raises(Refused, match=message):
        plan_evaluate(job, tokenizer, text if job.quick is not None else None)
    assert not any(tmp_path.iterdir())


def test_models_that_cannot_be_compared_are_refused(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    bos_tokenizer: PreTrainedTokenizerFast,
    text: TextSource,
    favourites: Callable[..., Any],
    logits_model: Callable[..., Any],
    reporter: Reporter,
) -> None:
    plan = plan_evaluate(EvaluateJob(tmp_path / "report", QUICK, None, None), tokenizer, text)
    good = Contender(favourites(), "b" * 64, tokenizer)
    bigger = replace(favourites(), vocab_size=good.model.vocab_size + 1)
    shorter = replace(favourites(), max_model_len=47)
    cases = [
        (replace(good, model=bigger), "vocabularies differ"),
        (replace(good, tokenizer=bos_tokenizer), "gives other ids"),
        (replace(good, model=shorter), "do not fit in the context of the candidate, 47"),
    ]
    for candidate, message in cases:
        with pytest.raises(Refused, match=message):
            evaluate_quality(plan, candidate, good, reporter)
    assert not (tmp_path / "report").exists()
