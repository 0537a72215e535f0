"""The cloze task run on both models: items become token ids, are scored and compared.

Item making is in `cloze`; this module knows models and the encoder, but no text source and no gate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel
from bitsmith.evaluate.cloze import NUM_CHOICES, ClozeItem
from bitsmith.evaluate.continuations import score_continuations
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.item_level import (
    ScoreName,
    logprob_drop,
    logprob_drop_kind,
    score_measurements,
    why_void,
)
from bitsmith.evaluate.measurement import Measurement

_ACCURACY = ScoreName("cloze_accuracy", "Cloze accuracy")
_DROP = logprob_drop_kind("cloze", "Cloze")
CLOZE_METRICS = (*_ACCURACY.kinds(), _DROP)

_NUM_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ClozeAnswer:
    """ln P of each choice of one item. margin: between the chosen one and the next, nats."""

    logprobs: tuple[float, ...]

    @property
    def chosen(self) -> int:
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)

    def score(self, right: int) -> float:
        """1 for right, 0 for wrong, NaN when a likelihood is NaN: a broken model has no score."""
        return math.nan if any(map(math.isnan, self.logprobs)) else float(self.chosen == right)

    @property
    def margin(self) -> float:
        best, second = sorted(self.logprobs, reverse=True)[:2]
        return best - second


def answer_cloze(
    model: LogitsModel,
    encoder: TextEncoder,
    items: Sequence[ClozeItem],
    context_len: int,
    reporter: Reporter,
) -> list[ClozeAnswer]:
    """One answer per item, in order. context_len: the same for both models, or their prompts would differ."""
    pairs = [encoder.continuation(item.context, choice) for item in items for choice in item.choices]
    scored = score_continuations(model, pairs, context_len, reporter, f"cloze items, {model.name}")
    logprobs = [score.logprob for score in scored]
    starts = range(0, len(logprobs), NUM_CHOICES)
    return [ClozeAnswer(tuple(logprobs[start : start + NUM_CHOICES])) for start in starts]


def cloze_measurements(
    items: Sequence[ClozeItem], baseline: Sequence[ClozeAnswer], candidate: Sequence[ClozeAnswer]
) -> tuple[list[Measurement], dict[str, str]]:
    """(measurements, metric -> why it was not measured)."""
    before = [a.score(item.answer) for item, a in zip(items, baseline, strict=True)]
    after = [a.score(item.answer) for item, a in zip(items, candidate, strict=True)]
    gold_before = [a.logprobs[item.answer] for item, a in zip(items, baseline, strict=True)]
    gold_after = [a.logprobs[item.answer] for item, a in zip(items, candidate, strict=True)]
    drop = logprob_drop(_DROP, gold_before, gold_after)
    void = why_void(before, 1 / NUM_CHOICES)
    if void is not None:
        return [drop], {kind.name: void for kind in _ACCURACY.kinds()}
    return [*score_measurements(_ACCURACY, before, after), drop], {}


def changed_answers(
    items: Sequence[ClozeItem], baseline: Sequence[ClozeAnswer], candidate: Sequence[ClozeAnswer]
) -> list[dict[str, Any]]:
    """The items on which the two models choose differently, with what each chose and by how much."""
    changed: list[dict[str, Any]] = []
    for index, (item, before, after) in enumerate(zip(items, baseline, candidate, strict=True)):
        if before.chosen != after.chosen:
            changed.append(
                {
                    "item": index,
                    "prompt_end": item.context[-_NUM_SHOWN_CHARACTERS:],
                    "target": item.choices[item.answer].strip(),
                    "baseline": item.choices[before.chosen].strip(),
                    "candidate": item.choices[after.chosen].strip(),
                    "baseline_margin": before.margin,
                    "candidate_margin": after.margin,
                }
            )
    return changed
