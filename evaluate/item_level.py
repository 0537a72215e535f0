"""Task-level quality: the same items answered by both models, compared item by item.

Terms: an item is *lost* when the baseline was right and the candidate is wrong, *gained* the other way
round; the loss of a score is (lost - gained) / items; *flips* are lost plus gained, which a stable score
can hide. Knows nothing of models, prompts or how answers were made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitsmith.evaluate.intervals import Estimate, PairedLoss, ShareEstimate, StratifiedLoss, mean_estimate
from bitsmith.evaluate.measurement import Measurement, MetricKind, measure

MACRO_LOSS = MetricKind("tasks_loss", "Loss, mean over tasks", "", False, "item")


@dataclass(frozen=True, slots=True)
class ScoreName:
    """How a score of a task is called. key: such as `cloze_accuracy`; title: for people."""

    key: str
    title: str
    higher_is_better: bool = True

    def kinds(self) -> tuple[MetricKind, ...]:
        """The metrics that comparing this score gives, in the order of `score_measurements`."""
        up = self.higher_is_better
        return (
            MetricKind(self.key, self.title, "", up, "item"),
            MetricKind(f"baseline_{self.key}", f"{self.title}, baseline", "", up, "item"),
            MetricKind(f"{self.key}_loss", f"{self.title}, paired loss", "", False, "item"),
            MetricKind(f"{self.key}_flips", f"{self.title}, flips", "", False, "item"),
        )


def logprob_drop_kind(key: str, title: str) -> MetricKind:
    return MetricKind(
        f"{key}_logprob_drop", f"{title}, log-likelihood drop of the right answer", "nats", False, "item"
    )


def score_measurements(
    name: ScoreName, baseline: Sequence[float], candidate: Sequence[float]
) -> list[Measurement]:
    """Both scores, the paired loss, and for right/wrong scores the flips. One entry per item, same order."""
    assert len(baseline) == len(candidate) > 0, (len(baseline), len(candidate))
    before, after = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    own, of_baseline, loss, flips = name.kinds()
    if not (_is_binary(before) and _is_binary(after)):
        change = before - after if name.higher_is_better else after - before
        estimates = [(own, after), (of_baseline, before), (loss, change)]
        return [measure(kind, mean_estimate(values)) for kind, values in estimates]
    counts = paired_loss(before, after, higher_is_better=name.higher_is_better)
    num_items = len(before)
    shares: list[tuple[MetricKind, Estimate]] = [
        (own, ShareEstimate(num_items, float(after.sum()))),
        (of_baseline, ShareEstimate(num_items, float(before.sum()))),
        (loss, counts),
        (flips, ShareEstimate(num_items, counts.num_lost + counts.num_gained)),
    ]
    return [measure(kind, estimate, num_items) for kind, estimate in shares]


def paired_loss(
    before: NDArray[np.float64],  # [num_items] of 0 and 1
    after: NDArray[np.float64],  # [num_items] of 0 and 1
    *,
    higher_is_better: bool = True,
) -> PairedLoss:
    num_down, num_up = int((before > after).sum()), int((after > before).sum())
    lost, gained = (num_down, num_up) if higher_is_better else (num_up, num_down)
    return PairedLoss(len(before), lost, gained)


def logprob_drop(kind: MetricKind, baseline: Sequence[float], candidate: Sequence[float]) -> Measurement:
    """Mean over items of how much less likely, in nats, the right answer has become."""
    drops = [before - after for before, after in zip(baseline, candidate, strict=True)]
    return measure(kind, mean_estimate(drops))


def macro_loss(losses: Sequence[Measurement]) -> Measurement | None:
    """Mean of the right/wrong losses of several tasks; None when there are fewer than two."""
    strata = tuple(m.estimate for m in losses if isinstance(m.estimate, PairedLoss))
    return measure(MACRO_LOSS, StratifiedLoss(strata)) if len(strata) > 1 else None


def why_void(baseline: Sequence[float], chance: float) -> str | None:
    """Why these items cannot show a loss, or None: a baseline that guesses has nothing to lose.

    chance: expected score of guessing, 0 for generated answers; up to two standard errors above it counts
    as guessing.
    """
    mean = mean_estimate(baseline)
    if not all(value in (0.0, 1.0) for value in baseline):
        return None
    spread = math.sqrt(chance * (1 - chance) / len(baseline))
    if mean.value <= chance + 2 * spread:
        return (
            f"void, the baseline scores {mean.value:.3f} over {len(baseline)} items where guessing gives "
            f"{chance:.3f}, so there is nothing to lose"
        )
    return None


def _is_binary(values: NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
