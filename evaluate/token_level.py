"""Token-level quality: both models over the same windows of text, compared position by position.

Windows are scored one after another and reduced to a few numbers per position at once, so memory holds the
logits of one window per model, whatever the number of windows. Errors are by window, since the tokens of
a window depend on one another. Knows nothing of tokenizers, texts or gates.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bitsmith.core.errors import WorkFailed
from bitsmith.core.progress import Reporter
from bitsmith.core.protocols import LogitsModel, ScoringRequest
from bitsmith.evaluate.divergence import TokenScores, compare_logits
from bitsmith.evaluate.intervals import MeanEstimate, exp_estimate, mean_estimate
from bitsmith.evaluate.measurement import Measurement, MetricKind, measure

SELF_KL_LIMIT = 1e-6  # nats/token between two passes of one model: above it the comparison means nothing

_BOOTSTRAP_DRAWS = 500
_BOOTSTRAP_SEED = 20240607

TOKEN_METRICS = tuple(
    MetricKind(name, title, unit, higher_is_better, "window")
    for name, title, unit, higher_is_better in (
        ("perplexity", "Perplexity", "", False),
        ("baseline_perplexity", "Perplexity of the baseline", "", False),
        ("perplexity_ratio", "Perplexity, candidate / baseline", "", False),
        ("ln_perplexity_difference", "ln perplexity, candidate - baseline", "nats/token", False),
        ("kl_mean", "KL divergence, mean", "nats/token", False),
        ("kl_median", "KL divergence, median", "nats/token", False),
        ("kl_p99", "KL divergence, 99th percentile", "nats/token", False),
        ("top1_agreement", "Same most likely token", "", True),
        ("mean_delta_p", "Change of the true token's probability, mean", "", True),
        ("rms_delta_p", "Change of the true token's probability, RMS", "", False),
    )
)
_KINDS = {kind.name: kind for kind in TOKEN_METRICS}


def score_windows(
    baseline: LogitsModel,
    candidate: LogitsModel,
    windows: torch.Tensor,  # [num_windows, window_len] int64
    reporter: Reporter,
) -> list[TokenScores]:
    """One entry per window, of window_len - 1 positions: the first token has nothing before it."""
    requests = [_request(window) for window in windows]
    pairs = zip(windows, baseline.score(requests), candidate.score(requests), strict=True)
    tracked = reporter.track(pairs, total=len(requests), label="windows of text")
    return [compare_logits(first, second, window[1:]) for window, first, second in tracked]


def _request(window: torch.Tensor) -> ScoringRequest:
    token_ids = tuple(int(i) for i in window[:-1])
    return ScoringRequest(token_ids, len(token_ids))


def repeat_noise(model: LogitsModel, windows: torch.Tensor) -> float:
    """Mean KL, nats/token, of a window scored alone against the same window scored among others."""
    alone = next(iter(model.score([_request(windows[0])])))
    among = next(iter(model.score([_request(window) for window in windows])))
    return float(compare_logits(alone, among, windows[0][1:]).kl.mean())


def check_repeatable(model: LogitsModel, noise: float) -> None:
    """Raises WorkFailed when a model differs from itself by more than SELF_KL_LIMIT, or is not a number."""
    if not noise <= SELF_KL_LIMIT:
        raise WorkFailed(
            f"{model.name} differs from itself: mean KL {noise:.3g} nats/token between one window scored "
            f"alone and in a batch (limit {SELF_KL_LIMIT:g}). No comparison with it can be trusted."
        )


def token_measurements(windows: Sequence[TokenScores]) -> list[Measurement]:
    """Every metric of TOKEN_METRICS, in that order."""
    num_tokens = sum(len(window.kl) for window in windows)
    loss = mean_estimate([-float(window.candidate_logprob.mean()) for window in windows])
    baseline_loss = mean_estimate([-float(window.baseline_logprob.mean()) for window in windows])
    difference = mean_estimate(window_ln_ppl_differences(windows))
    agreement = mean_estimate([float(window.same_top1.mean()) for window in windows])
    median, p99 = _kl_quantiles(windows, (0.5, 0.99))
    estimates = {
        "perplexity": exp_estimate(loss),
        "baseline_perplexity": exp_estimate(baseline_loss),
        "perplexity_ratio": exp_estimate(difference),
        "ln_perplexity_difference": difference,
        "kl_mean": mean_estimate([float(window.kl.mean()) for window in windows]),
        "kl_median": median,
        "kl_p99": p99,
        "top1_agreement": agreement,
        "mean_delta_p": mean_estimate([float(window.delta_p.mean()) for window in windows]),
        "rms_delta_p": _root(mean_estimate([float((window.delta_p**2).mean()) for window in windows])),
    }
    counted = {"top1_agreement": num_tokens}
    return [measure(_KINDS[name], estimate, counted.get(name)) for name, estimate in estimates.items()]


def window_ln_ppl_differences(windows: Sequence[TokenScores]) -> list[float]:
    """ln perplexity of the candidate less the baseline's, for each window; positive is worse."""
    return [float((window.baseline_logprob - window.candidate_logprob).mean()) for window in windows]


def _root(mean_square: MeanEstimate) -> MeanEstimate:
    """Square root with its delta-method standard error."""
    root = math.sqrt(mean_square.value) if mean_square.value >= 0 else math.nan
    if mean_square.stderr is None:
        return MeanEstimate(root, None, mean_square.num_samples)
    stderr = mean_square.stderr / (2 * root) if root > 0 else mean_square.stderr
    return MeanEstimate(root, stderr, mean_square.num_samples)


def _kl_quantiles(windows: Sequence[TokenScores], levels: tuple[float, ...]) -> list[MeanEstimate]:
    """Quantiles over all tokens; standard errors by resampling whole windows, with a fixed seed."""
    kl = np.stack([window.kl for window in windows])  # [num_windows, num_tokens]
    values: NDArray[np.float64] = np.quantile(kl, levels)
    if len(windows) < 2 or not np.isfinite(kl).all():
        return [MeanEstimate(float(value), None, len(windows)) for value in values]
    generator = np.random.default_rng(_BOOTSTRAP_SEED)
    draws = np.stack(
        [
            np.quantile(kl[generator.integers(len(windows), size=len(windows))], levels)
            for _ in range(_BOOTSTRAP_DRAWS)
        ]
    )  # [_BOOTSTRAP_DRAWS, num_levels]
    stderrs = draws.std(axis=0, ddof=1)
    return [MeanEstimate(float(v), float(e), len(windows)) for v, e in zip(values, stderrs, strict=True)]
