"""The `quick` suite: token-level comparison and the cloze task, from one text, without downloads.

`plan_quick` needs only a tokenizer and a text, so everything that can be refused is refused before a model
is loaded. Knows nothing of gates, reports or artifacts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bitsmith.core.digest import sha256_bytes
from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel
from bitsmith.core.text_source import TextSource, pack_windows
from bitsmith.evaluate.cloze import ClozeItem, make_cloze_items
from bitsmith.evaluate.cloze_task import CLOZE_METRICS, answer_cloze, changed_answers, cloze_measurements
from bitsmith.evaluate.divergence import TokenScores, concatenate_scores
from bitsmith.evaluate.encoding import TextEncoder
from bitsmith.evaluate.measurement import Measurement, finite_or_none
from bitsmith.evaluate.token_level import (
    SELF_KL_LIMIT,
    TOKEN_METRICS,
    check_repeatable,
    repeat_noise,
    score_windows,
    token_measurements,
    window_ln_ppl_differences,
)

QUICK_METRICS = (*TOKEN_METRICS, *CLOZE_METRICS)

_NUM_NOISE_WINDOWS = 2
_NUM_POSITION_BINS = 16
_KL_LOG10_EDGES = np.arange(-6.0, 2.01, 0.25)
_KL_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True, slots=True)
class QuickSettings:
    """num_windows windows of seq_len tokens, side by side, and num_cloze_items passages of the same text."""

    num_windows: int = 40
    seq_len: int = 512
    num_cloze_items: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class QuickPlan:
    """windows: [num_windows, seq_len] int64. packing: how they were cut from the text, in words."""

    settings: QuickSettings
    text: TextSource
    encoder: TextEncoder
    windows: torch.Tensor
    packing: str
    items: Sequence[ClozeItem]

    @property
    def data_digest(self) -> str:
        """Of what is scored: the ids of the windows and the cloze items."""
        ids = self.windows.numpy().astype("<i8").tobytes()
        return sha256_bytes(ids + repr([asdict(item) for item in self.items]).encode())


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """measurements and not_measured as the gate takes them; details for the report."""

    measurements: list[Measurement]
    not_measured: dict[str, str]
    details: dict[str, Any]


def plan_quick(settings: QuickSettings, encoder: TextEncoder, text: TextSource) -> QuickPlan:
    """Raises Refused when the text does not give as much as was asked for."""
    if settings.num_windows < 2 or settings.seq_len < 2 or settings.num_cloze_items < 2:
        raise Refused(
            f"The quick suite needs at least 2 windows of 2 tokens and 2 cloze items, found "
            f"{settings.num_windows} windows of {settings.seq_len} and {settings.num_cloze_items} items: "
            "no error can be estimated from fewer."
        )
    packed = pack_windows(
        text,
        encoder.tokenizer,
        num_windows=settings.num_windows,
        seq_len=settings.seq_len,
        seed=settings.seed,
    )
    if packed.num_obtained < settings.num_windows:
        raise Refused(
            f"{text.name} gives {packed.num_obtained} windows of {settings.seq_len} tokens; "
            f"{settings.num_windows} were asked for. Ask for fewer or shorter windows, or give a longer text."
        )
    items = make_cloze_items(text.documents, settings.num_cloze_items, settings.seed)
    return QuickPlan(settings, text, encoder, packed.token_ids, packed.packing, items)


def run_quick(
    plan: QuickPlan, baseline: LogitsModel, candidate: LogitsModel, reporter: Reporter
) -> SuiteResult:
    """Raises WorkFailed when the baseline does not agree with itself."""
    noise = {
        "baseline": repeat_noise(baseline, plan.windows[:_NUM_NOISE_WINDOWS]),
        "candidate": repeat_noise(candidate, plan.windows[:_NUM_NOISE_WINDOWS]),
    }
    check_repeatable(baseline, noise["baseline"])
    windows = score_windows(baseline, candidate, plan.windows, reporter)
    context_len = min(baseline.max_model_len, candidate.max_model_len)
    before, after = (
        answer_cloze(model, plan.encoder, plan.items, context_len, reporter)
        for model in (baseline, candidate)
    )
    cloze, not_measured = cloze_measurements(plan.items, before, after)
    details = {
        "tokens": _token_details(windows),
        "cloze": {"num_items": len(plan.items), "changed": changed_answers(plan.items, before, after)},
        "repeat_noise": {
            "limit": SELF_KL_LIMIT,
            **{role: finite_or_none(value) for role, value in noise.items()},
        },
    }
    return SuiteResult([*token_measurements(windows), *cloze], not_measured, details)


def _token_details(windows: Sequence[TokenScores]) -> dict[str, Any]:
    """What the plots show; nothing in here grows with the number of tokens."""
    scores = concatenate_scores(windows)
    kl = scores.kl
    finite = kl[np.isfinite(kl)]
    counts, _ = np.histogram(np.log10(np.clip(finite, 10 ** _KL_LOG10_EDGES[0], None)), bins=_KL_LOG10_EDGES)
    percentiles = np.percentile(finite, _KL_PERCENTILES).tolist() if len(finite) else []
    return {
        "num_tokens": len(kl),
        "num_not_finite": len(kl) - len(finite),
        "ln_ppl_difference_by_window": [finite_or_none(d) for d in window_ln_ppl_differences(windows)],
        "kl_histogram": {"log10_edges": _KL_LOG10_EDGES.tolist(), "counts": counts.tolist()},
        "kl_percentiles": {f"{p:g}": value for p, value in zip(_KL_PERCENTILES, percentiles, strict=False)},
        "by_position": _by_position(windows),
    }


def _by_position(windows: Sequence[TokenScores]) -> list[dict[str, Any]]:
    """Agreement and mean KL along the window, in bins: errors that grow with the context show here."""
    agreement = np.stack([window.same_top1 for window in windows]).mean(axis=0)  # [num_positions]
    kl = np.stack([window.kl for window in windows]).mean(axis=0)  # [num_positions]
    num_bins = min(_NUM_POSITION_BINS, len(kl))
    bins = np.array_split(np.arange(len(kl)), num_bins)
    return [
        {
            "first": int(positions[0]) + 1,
            "last": int(positions[-1]) + 1,
            "top1_agreement": finite_or_none(float(agreement[positions].mean())),
            "kl_mean": finite_or_none(float(kl[positions].mean())),
        }
        for positions in bins
    ]
