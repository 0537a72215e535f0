"""Which scores a task will give, known from its file before it runs, and which of them are refused.

Only scores whose value for a task is the mean of the values of its items can be compared item by item;
other aggregates (a corpus BLEU, a word perplexity) are shown beside them but have no error and no gate.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.api.registry import (
    DEFAULT_METRIC_REGISTRY,
    METRIC_REGISTRY,
    get_aggregation,
    get_metric_aggregation,
    is_higher_better,
)

from bitsmith.core.errors import Refused
from bitsmith.evaluate.item_level import ScoreName, logprob_drop_kind
from bitsmith.evaluate.measurement import MetricKind
from bitsmith.evaluate.task_files import TaskFile

# Scripts that lm-eval fetches from the hub; offline its look-up returns None and the run ends much later.
_HUB_METRICS = frozenset(
    {"rouge", "bertscore", "bleurt", "code_eval", "squad_v2", "rouge1", "rouge2", "rougeL"}
)
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One score of one task under one of its filters, and what it is called in gates and reports."""

    metric: str
    filter_name: str
    name: ScoreName


@dataclass(frozen=True, slots=True)
class TaskOutline:
    """What one task will measure. scores_likelihood: items have a log-likelihood of the right answer."""

    name: str
    output_type: str
    scores: tuple[TaskScore, ...]
    scores_likelihood: bool

    @property
    def key(self) -> str:
        return _NAME.sub("_", self.name)

    @property
    def drop(self) -> MetricKind:
        return logprob_drop_kind(self.key, self.name)

    def metric_kinds(self) -> tuple[MetricKind, ...]:
        kinds = tuple(kind for score in self.scores for kind in score.name.kinds())
        return (*kinds, self.drop) if self.scores_likelihood else kinds


def outline(file: TaskFile) -> TaskOutline:
    """Raises Refused for metrics that do not exist or cannot be computed without the hub."""
    config = file.config
    output_type = str(config.get("output_type", "generate_until"))
    filters = [str(f["name"]) for f in config.get("filter_list") or []] or ["none"]
    scores = []
    for entry in config.get("metric_list") or _default_metrics(output_type):
        metric = _metric_name(file, entry)
        if not _is_mean(file, metric, entry):
            continue
        for filter_name in filters:
            suffix = f"_{filter_name}" if len(filters) > 1 else ""
            key = _NAME.sub("_", f"{file.name}_{metric}{suffix}")
            name = ScoreName(key, f"{file.name} {metric}{suffix}", _is_higher_better(metric, entry))
            scores.append(TaskScore(metric, filter_name, name))
    return TaskOutline(file.name, output_type, tuple(scores), output_type != "generate_until")


def _default_metrics(output_type: str) -> list[dict[str, Any]]:
    return [{"metric": name} for name in DEFAULT_METRIC_REGISTRY.get(output_type, [])]


def _metric_name(file: TaskFile, entry: Mapping[str, Any]) -> str:
    metric = str(entry.get("metric"))
    if entry.get("hf_evaluate") or metric in _HUB_METRICS:
        raise Refused(
            f"Task {file.name!r} uses the metric {metric!r}, which is a script fetched from the hub. "
            "Not supported; use a task with one of lm-eval's own metrics."
        )
    if "/" in metric:  # a function of the task's own, unresolved: <folder of the file>/<module>.<function>
        return metric.rpartition(".")[2]
    if metric not in METRIC_REGISTRY and "process_results" not in file.config:
        known = ", ".join(sorted(METRIC_REGISTRY))
        raise Refused(f"Task {file.name!r} uses an unknown metric {metric!r}. Known metrics: {known}.")
    return metric


def _is_mean(file: TaskFile, metric: str, entry: Mapping[str, Any]) -> bool:
    aggregation = entry.get("aggregation")
    if isinstance(aggregation, str):
        return aggregation == "mean"
    if metric not in METRIC_REGISTRY:
        raise Refused(f"Task {file.name!r}: the metric {metric!r} needs an aggregation.")
    return bool(get_metric_aggregation(metric) is get_aggregation("mean"))


def _is_higher_better(metric: str, entry: Mapping[str, Any]) -> bool:
    given = entry.get("higher_is_better")
    if given is not None:
        return bool(given)
    return bool(is_higher_better(metric)) if metric in METRIC_REGISTRY else True
