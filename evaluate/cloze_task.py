"""The cloze task run on both models: items become token ids, are scored and compared.

Item making is in `cloze`; this module knows models and the encoder, but no text source and no gate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    @property
    def margin(self) -> float:
        best, second = sorted(self.logprobs, reverse=True)[:2]
        return best - second


def answer_cloze(model: LogitsModel, encoder: TextEncoder, items: Sequence[ClozeItem]) -> list[ClozeAnswer]:
    """One answer per item, in order."""
    pairs = [encoder.continuation(item.context, choice) for item in items for choice in item.choices]
    scores = [score.logprob for score in score_continuations(model, pairs)]
    return [
        ClozeAnswer(tuple(scores[start : start + NUM_CHOICES]))
        for start in range(0, len(scores), NUM_CHOICES)
    ]


def cloze_measurements(
    items: Sequence[ClozeItem], baseline: Sequence[ClozeAnswer], candidate: Sequence[ClozeAnswer]
) -> tuple[list[Measurement], dict[str, str]]:
    """(measurements, metric -> why it was not measured)."""
    before = [float(a.chosen == item.answer) for item, a in zip(items, baseline, strict=True)]
    after = [float(a.chosen == item.answer) for item, a in zip(items, candidate, strict=True)]
    gold_before = [a.logprobs[item.answer] for item, a in zip(items, baseline, strict=True)]
    gold_after = [a.logprobs[item.answer] for item, a in zip(items, candidate, strict=True)]
    drop = logprob_drop(_DROP, gold_before, gold_after)
    void = why_void(before, 1 / NUM_CHOICES)
    if void is not None:
        return [drop], {kind.name: void for kind in _ACCURACY.kinds()}
    return [*score_measurements(_ACCURACY, before, after), drop], {}


def changed_answers(
    items: Sequence[ClozeItem], baseline: Sequence[ClozeAnswer], candidate: Sequence[ClozeAnswer]
) -> list[Mapping[str, Any]]:
    """The items on which the two models choose differently, with what each chose and by how much."""
    changed = []
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
