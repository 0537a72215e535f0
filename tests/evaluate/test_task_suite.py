"""lm-eval tasks on two models: pairing, counts, and the lists that the report shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.harness import HarnessRun, load_tasks, run_tasks
from bitsmith.evaluate.item_level import ScoreName
from bitsmith.evaluate.lm_eval_model import AnswerNotes, HarnessModel
from bitsmith.evaluate.task_comparison import compare_task
from bitsmith.evaluate.task_files import TaskSelection, TaskSettings, select_tasks
from bitsmith.evaluate.task_scores import TaskOutline, TaskScore, outline
from bitsmith.evaluate.task_suite import run_task_suite, task_metric_kinds

CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
LAST_WORD = """
task: last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/last_word.jsonl}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
CONTINUE = """
task: continue
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/last_word.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "river"
generation_kwargs: {{until: ["."], do_sample: false, max_gen_toks: 6}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
NUM_ITEMS = 24


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, documents: tuple[str, ...]) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    words = " ".join(documents).replace(".", "").split()
    choices, texts = [], []
    for index in range(NUM_ITEMS):
        piece = words[index * 30 : index * 30 + 12]
        answers = [words[5000 + index], piece[-1], words[6000 + index]]
        choices.append({"question": " ".join(piece[:-1]), "choices": answers, "label": 1})
        texts.append({"text": " ".join(piece)})
    for name, rows in (("choice", choices), ("last_word", texts)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, template in (("choice", CHOICE), ("last_word", LAST_WORD), ("continue", CONTINUE)):
        (path / f"{name}.yaml").write_text(template.format(folder=path))
    return path


def _select(folder: Path, *names: str, **settings: Any) -> tuple[TaskSelection, tuple[TaskOutline, ...]]:
    selection = select_tasks(TaskSettings(names, (folder,), **settings))
    return selection, tuple(outline(file) for file in selection.files)


def test_items_equal_those_of_lm_eval_s_own_run(
    folder: Path,
    llama: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    logits_model: Callable[..., Any],
    reporter: Reporter,
) -> None:
    selection, _ = _select(folder, "choice", "last_word", "continue")
    model = logits_model()
    ours = run_tasks(
        HarnessModel(model, TextEncoder(tokenizer), model.max_model_len, reporter, model), selection
    )
    hflm = HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=1)
    theirs = evaluate(hflm, load_tasks(selection), bootstrap_iters=0)
    for task in ("choice", "last_word"):
        assert len(ours.items[task]) == NUM_ITEMS
        for mine, other in zip(ours.items[task], theirs["samples"][task], strict=True):
            assert mine["prompt_hash"] == other["prompt_hash"]
            for (logprob, greedy), (expected, is_greedy) in zip(
                mine["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert logprob == pytest.approx(expected, abs=1e-5)
                assert greedy == is_greedy
    generated = [item["filtered_resps"] for item in ours.items["continue"]]
    assert generated == [item["filtered_resps"] for item in theirs["samples"]["continue"]]


def test_two_models_compared(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    favourites: Callable[..., Any],
    reporter: Reporter,
) -> None:
    selection, outlines = _select(folder, "choice", "last_word", limit=20)
    players = ((favourites(), None), (favourites(every=3), None))
    result = run_task_suite(selection, outlines, TextEncoder(tokenizer), players, reporter)
    values = {m.metric.name: m.metric for m in result.measurements}
    assert {kind.name for kind in task_metric_kinds(outlines)} == set(values) | set(result.not_measured)
    assert values["choice_acc"].num_samples == 20
    assert values["choice_logprob_drop"].value > 0
    assert values["last_word_logprob_drop"].value > 0
    assert values["tasks_loss"].value == pytest.approx(
        (values["choice_acc_loss"].value + values["last_word_acc_loss"].value) / 2
    )
    choice, last_word = result.details["tasks"]
    assert choice["logprob_difference"]["num_logprobs"] == 60
    assert choice["logprob_difference"]["max"] >= choice["logprob_difference"]["mean"] > 0
    assert choice["num_changed"] == len(choice["changed"])
    assert last_word["aggregates"]["baseline"]["perplexity,none"] > 1


def test_a_model_against_itself_changes_nothing(
    folder: Path, tokenizer: PreTrainedTokenizerFast, favourites: Callable[..., Any], reporter: Reporter
) -> None:
    selection, outlines = _select(folder, "choice")
    players = ((favourites(), None), (favourites(), None))
    result = run_task_suite(selection, outlines, TextEncoder(tokenizer), players, reporter)
    values = {m.metric.name: m.metric.value for m in result.measurements}
    assert values["choice_acc_loss"] == values["choice_acc_flips"] == values["choice_logprob_drop"] == 0
    assert result.details["tasks"][0]["num_changed"] == 0
    assert result.details["tasks"][0]["logprob_difference"]["max"] == 0


def _item(index: int, logprobs: list[float], prompt: str = "p") -> dict[str, Any]:
    gold = 0
    chosen = max(range(len(logprobs)), key=logprobs.__getitem__)
    return {
        "doc_id": index,
        "doc_hash": f"d{index}",
        "filter": "none",
        "prompt_hash": prompt,
        "target_hash": "t",
        "target": gold,
        "arguments": [("a prompt", " x"), ("a prompt", " y")],
        "filtered_resps": [(value, False) for value in logprobs],
        "metrics": ["acc"],
        "acc": float(chosen == gold),
    }


def _run(items: list[dict[str, Any]]) -> HarnessRun:
    return HarnessRun({"t": items}, {"t": {"acc,none": 0.5}}, {"t": 0}, AnswerNotes())


OUTLINE = TaskOutline("t", "multiple_choice", (TaskScore("acc", "none", ScoreName("t_acc", "t acc")),), True)


def test_counts_and_margins_by_hand() -> None:
    right, wrong = [-1.0, -2.5], [-3.0, -2.0]
    baseline = _run([_item(0, right), _item(1, right), _item(2, wrong), _item(3, right)])
    candidate = _run([_item(0, right), _item(1, wrong), _item(2, right), _item(3, wrong)])
    result = compare_task(OUTLINE, baseline, candidate)
    # With four items the baseline's 3 of 4 is within two standard errors of guessing one of two.
    assert "nothing to lose" in result.not_measured["t_acc_loss"]
    (drop,) = result.measurements
    assert drop.metric.value == pytest.approx((0 + 2 - 2 + 2) / 4)
    assert [row["item"] for row in result.details["changed"]] == [1, 2, 3]
    assert result.details["changed"][0]["baseline_margin"] == pytest.approx(1.5)
    assert result.details["changed"][0]["candidate_margin"] == pytest.approx(1.0)

    many_before = _run([_item(i, right) for i in range(40)])
    many_after = _run([_item(i, wrong if i < 6 else right) for i in range(40)])
    values = {
        m.metric.name: m.metric.value for m in compare_task(OUTLINE, many_before, many_after).measurements
    }
    assert values["t_acc_loss"] == pytest.approx(6 / 40)
    assert values["t_acc_flips"] == pytest.approx(6 / 40)


def test_different_prompts_or_items_are_not_compared() -> None:
    baseline = _run([_item(0, [-1.0, -2.0])])
    with pytest.raises(Refused, match="did not get the same prompt"):
        compare_task(OUTLINE, baseline, _run([_item(0, [-1.0, -2.0], prompt="with a template")]))
    with pytest.raises(Refused, match="cannot be paired"):
        compare_task(OUTLINE, baseline, _run([]))
