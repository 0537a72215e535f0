"""The cloze task: items are what the rules say, and scoring finds who knows the text."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.evaluate.cloze import make_cloze_items
from bitsmith.evaluate.cloze_task import answer_cloze, changed_answers, cloze_measurements
from bitsmith.evaluate.encoding import TextEncoder


def test_items_follow_the_rules(documents: tuple[str, ...]) -> None:
    items = make_cloze_items(documents, 40, seed=3)
    assert len(items) == 40
    for item in items:
        right = item.choices[item.answer]
        assert len(set(item.choices)) == 4
        assert all(choice.startswith(" ") and choice.strip().isalpha() for choice in item.choices)
        assert any(item.context + right in document for document in documents)
        assert len(item.context.split()) >= 48


def test_passages_do_not_overlap(documents: tuple[str, ...]) -> None:
    items = make_cloze_items(documents[:3], 9, seed=0)
    whole = "\n".join(documents[:3])
    spans = sorted((whole.find(item.context), whole.find(item.context) + len(item.context)) for item in items)
    assert all(first[1] < second[0] for first, second in pairwise(spans))


def test_the_answer_s_place_tells_nothing(documents: tuple[str, ...]) -> None:
    places = [item.answer for item in make_cloze_items(documents, 100, seed=0)]
    assert min(places.count(place) for place in range(4)) >= 12


def test_same_seed_same_items(documents: tuple[str, ...]) -> None:
    assert make_cloze_items(documents, 20, seed=1) == make_cloze_items(documents, 20, seed=1)
    assert make_cloze_items(documents, 20, seed=1) != make_cloze_items(documents, 20, seed=2)


def test_code_and_line_starts_give_no_answers() -> None:
    sentence = "alpha beta gamma delta " * 20
    documents = [sentence + "call_name(\nalpha " + sentence + "--delta gamma_two"] * 3
    with pytest.raises(Refused, match="fewer cloze items or give a longer text"):
        make_cloze_items(documents, 5, seed=0)  # four words are too few to choose from


def test_too_short_a_text_is_refused(documents: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match=r"has \d+ passages"):
        make_cloze_items(documents[:1], 500, seed=0)


def _compare(
    items: Any, tokenizer: PreTrainedTokenizerFast, baseline: Any, candidate: Any, reporter: Reporter
) -> tuple[dict[str, Any], dict[str, str]]:
    encoder = TextEncoder(tokenizer)
    before = answer_cloze(baseline, encoder, items, 4096, reporter)
    after = answer_cloze(candidate, encoder, items, 4096, reporter)
    measured, not_measured = cloze_measurements(items, before, after)
    changed = changed_answers(items, before, after)
    assert all(row["baseline"] != row["candidate"] for row in changed)
    return {m.metric.name: m for m in measured}, not_measured


def test_a_model_against_itself_loses_nothing(
    documents: tuple[str, ...],
    tokenizer: PreTrainedTokenizerFast,
    favourites: Callable[..., Any],
    reporter: Reporter,
) -> None:
    items = make_cloze_items(documents, 60, seed=0)
    measured, _ = _compare(items, tokenizer, favourites(), favourites(), reporter)
    assert measured["cloze_accuracy"].metric.value > 0.4
    assert measured["cloze_accuracy_loss"].metric.value == 0
    assert measured["cloze_accuracy_flips"].metric.value == 0
    assert measured["cloze_logprob_drop"].metric.value == 0


def test_a_baseline_that_guesses_makes_the_task_void(
    documents: tuple[str, ...],
    tokenizer: PreTrainedTokenizerFast,
    favourites: Callable[..., Any],
    reporter: Reporter,
) -> None:
    items = make_cloze_items(documents, 40, seed=0)
    measured, not_measured = _compare(items, tokenizer, favourites(lead=0.0), favourites(), reporter)
    assert "nothing to lose" in not_measured["cloze_accuracy_loss"]
    assert set(measured) == {"cloze_logprob_drop"}
