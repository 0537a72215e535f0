"""Two harness runs of the same tasks, compared item by item.

Items are matched by document id, document hash and filter; prompts and targets must be the same, or the
comparison is refused: a difference of settings is not a difference of models. Knows nothing of models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitsmith.core.errors import Refused
from bitsmith.evaluate.harness import HarnessRun
from bitsmith.evaluate.item_level import logprob_drop, score_measurements, why_void
from bitsmith.evaluate.measurement import Measurement, finite_or_none
from bitsmith.evaluate.task_scores import TaskOutline

_Item = Mapping[str, Any]
_NUM_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """measurements and not_measured as the gate takes them; details for the report."""

    measurements: list[Measurement]
    not_measured: dict[str, str]
    details: dict[str, Any]


def compare_task(outline: TaskOutline, baseline: HarnessRun, candidate: HarnessRun) -> TaskComparison:
    """Raises Refused when the runs did not see the same items."""
    pairs = _pairs(outline.name, baseline.items[outline.name], candidate.items[outline.name])
    measurements: list[Measurement] = []
    not_measured: dict[str, str] = {}
    for score in outline.scores:
        chosen = [pair for pair in pairs if pair[0]["filter"] == score.filter_name]
        before = [_score(outline, item, score.metric) for item, _ in chosen]
        after = [_score(outline, item, score.metric) for _, item in chosen]
        void = why_void(before, _chance(outline, chosen)) if score.name.higher_is_better else None
        if void is None:
            measurements += score_measurements(score.name, before, after)
        else:
            not_measured |= {kind.name: void for kind in score.name.kinds()}
    own = [pair for pair in pairs if pair[0]["filter"] == pairs[0][0]["filter"]]
    if outline.scores_likelihood:
        measurements.append(_drop(outline, own))
    return TaskComparison(measurements, not_measured, _details(outline, own, baseline, candidate))


def _pairs(task: str, baseline: Sequence[_Item], candidate: Sequence[_Item]) -> list[tuple[_Item, _Item]]:
    by_key = {_key(item): item for item in candidate}
    if len(by_key) != len(candidate) or len(baseline) != len(candidate) or not baseline:
        raise Refused(
            f"Task {task!r}: {len(baseline)} items for the baseline, {len(candidate)} for the candidate; "
            "they cannot be paired."
        )
    pairs = []
    for item in baseline:
        other = by_key.get(_key(item))
        if other is None or any(item[k] != other[k] for k in ("prompt_hash", "target_hash")):
            raise Refused(
                f"Task {task!r}, document {item['doc_id']}: baseline and candidate did not get the same "
                "prompt. Their settings differ, so their scores cannot be compared."
            )
        pairs.append((item, other))
    return pairs


def _key(item: _Item) -> tuple[Any, ...]:
    return item["doc_id"], item["doc_hash"], item["filter"]


def _score(outline: TaskOutline, item: _Item, metric: str) -> float:
    """NaN where a likelihood is: lm-eval's arg-max would take NaN for the best answer."""
    value = item.get(metric)
    if any(map(math.isnan, _logprobs(outline, item))):
        return math.nan
    return float(value) if isinstance(value, bool | int | float | np.number) else math.nan


def _chance(outline: TaskOutline, pairs: Sequence[tuple[_Item, _Item]]) -> float:
    """Mean of 1 / choices over the items; 0 for answers that are generated or scored alone."""
    if outline.output_type != "multiple_choice":
        return 0.0
    return float(np.mean([1 / len(_choice_logprobs(item)) for item, _ in pairs]))


def _choice_logprobs(item: _Item) -> list[float]:
    """ln P of each choice. Mutual information scores every choice a second time without its context."""
    logprobs = [float(answer[0]) for answer in item["filtered_resps"]]
    return logprobs[: len(logprobs) // 2] if "acc_mutual_info" in item["metrics"] else logprobs


def _logprobs(outline: TaskOutline, item: _Item) -> list[float]:
    """Every log-likelihood that the item asked for."""
    match outline.output_type:
        case "multiple_choice":
            return _choice_logprobs(item)
        case "loglikelihood":
            return [float(item["filtered_resps"][0][0])]
        case "loglikelihood_rolling":
            return [float(item["filtered_resps"][0])]
    return []


def _gold(outline: TaskOutline, item: _Item) -> float | None:
    """ln P of the right answer; None where the target names no single choice."""
    logprobs = _logprobs(outline, item)
    if outline.output_type != "multiple_choice":
        return logprobs[0]
    target = item["target"]
    if isinstance(target, str):
        endings = [arguments[1].strip() for arguments in item["arguments"][: len(logprobs)]]
        target = endings.index(target.strip()) if target.strip() in endings else None
    return logprobs[target] if isinstance(target, int) and 0 <= target < len(logprobs) else None


def _drop(outline: TaskOutline, pairs: Sequence[tuple[_Item, _Item]]) -> Measurement:
    gold = [(_gold(outline, before), _gold(outline, after)) for before, after in pairs]
    known = [(before, after) for before, after in gold if before is not None and after is not None]
    return logprob_drop(outline.drop, [before for before, _ in known], [after for _, after in known])


def _details(
    outline: TaskOutline,
    pairs: Sequence[tuple[_Item, _Item]],
    baseline: HarnessRun,
    candidate: HarnessRun,
) -> dict[str, Any]:
    changed = [
        _changed(outline, before, after) for before, after in pairs if _differs(outline, before, after)
    ]
    return {
        "task": outline.name,
        "output_type": outline.output_type,
        "num_items": len(pairs),
        "num_shots": baseline.num_shots[outline.name],
        "num_changed": len(changed),
        "changed": changed,
        "logprob_difference": _difference_summary(outline, pairs),
        "aggregates": {
            "baseline": _figures(baseline.aggregates[outline.name]),
            "candidate": _figures(candidate.aggregates[outline.name]),
        },
    }


def _difference_summary(outline: TaskOutline, pairs: Sequence[tuple[_Item, _Item]]) -> dict[str, Any] | None:
    """|candidate - baseline| over every log-likelihood of every item, nats."""
    differences = [
        abs(after - before)
        for first, second in pairs
        for before, after in zip(_logprobs(outline, first), _logprobs(outline, second), strict=True)
    ]
    if not differences:
        return None
    values = np.array(differences)
    return {
        "num_logprobs": len(values),
        "mean": finite_or_none(float(values.mean())),
        "p99": finite_or_none(float(np.quantile(values, 0.99))),
        "max": finite_or_none(float(values.max())),
    }


def _answer(outline: TaskOutline, item: _Item) -> Any:
    """What the model said: the index of its choice, whether it would have written the text, or the text."""
    match outline.output_type:
        case "multiple_choice":
            return int(np.argmax(_choice_logprobs(item)))
        case "loglikelihood":
            return bool(item["filtered_resps"][0][1])
        case "loglikelihood_rolling":
            return None
    return str(item["filtered_resps"][0])


def _differs(outline: TaskOutline, before: _Item, after: _Item) -> bool:
    return bool(_answer(outline, before) != _answer(outline, after))


def _changed(outline: TaskOutline, before: _Item, after: _Item) -> dict[str, Any]:
    return {
        "item": before["doc_id"],
        "prompt_end": str(before["arguments"][0][0])[-_NUM_SHOWN_CHARACTERS:],
        "target": str(before["target"]),
        "baseline": str(_answer(outline, before)),
        "candidate": str(_answer(outline, after)),
        "baseline_margin": _margin(outline, before),
        "candidate_margin": _margin(outline, after),
    }


def _margin(outline: TaskOutline, item: _Item) -> float | None:
    """Nats between the chosen answer and the next; None where there is nothing to choose from."""
    if outline.output_type != "multiple_choice":
        return None
    best, second = sorted(_choice_logprobs(item), reverse=True)[:2]
    return finite_or_none(best - second)


def _figures(aggregates: Mapping[str, Any]) -> dict[str, float | None]:
    """lm-eval's own aggregates without its standard errors, which ignore the pairing."""
    numbers = ((key, value) for key, value in aggregates.items() if isinstance(value, int | float))
    return {key: finite_or_none(float(value)) for key, value in numbers if "_stderr" not in key}
