"""Estimates with one-sided confidence bounds, and how many samples would settle a comparison.

Knows nothing of models, metrics' names or gates. A *sample* is the unit that was drawn independently: a
window of tokens or a task item, never a single token (tokens of one window depend on one another).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

Scale = Literal["linear", "log"]
MAX_SAMPLES = 10**9  # beyond it a difference counts as never decided

_BOOTSTRAP_DRAWS = 10_000
_BOOTSTRAP_SEED = 20240607


class Estimate(Protocol):
    """A value with bounds that can be had at any confidence."""

    @property
    def value(self) -> float: ...

    @property
    def num_samples(self) -> int: ...

    def bounds(self, confidence: float) -> tuple[float, float]:
        """(lower, upper): each one-sided, so that the truth lies above `lower` with that confidence."""
        ...

    def resized(self, num_samples: int) -> Self:
        """The same observed proportions and spread, had there been `num_samples` samples."""
        ...


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over samples, or a smooth function of one with its delta-method standard error.

    scale "log": the error is symmetric on the logarithm (ratios), bounds are value · exp(±t·stderr/value).
    """

    value: float
    stderr: float | None
    num_samples: int
    scale: Scale = "linear"

    def bounds(self, confidence: float) -> tuple[float, float]:
        if self.stderr is None or self.num_samples < 2 or not math.isfinite(self.value):
            return -math.inf, math.inf
        reach = student_quantile(confidence, self.num_samples - 1) * self.stderr
        if self.scale == "linear":
            return self.value - reach, self.value + reach
        if self.value <= 0:
            return -math.inf, math.inf
        factor = math.exp(reach / self.value)
        return self.value / factor, self.value * factor

    def resized(self, num_samples: int) -> Self:
        if self.stderr is None:
            return replace(self, num_samples=num_samples)
        return replace(
            self, num_samples=num_samples, stderr=self.stderr * math.sqrt(self.num_samples / num_samples)
        )


@dataclass(frozen=True, slots=True)
class ShareEstimate:
    """A share of independent items; exact (Clopper-Pearson) bounds, so 0 of 100 is not taken for never.

    num_true: a float only after `resized`.
    """

    num_samples: int
    num_true: float

    @property
    def value(self) -> float:
        return self.num_true / self.num_samples

    def bounds(self, confidence: float) -> tuple[float, float]:
        true, false = self.num_true, self.num_samples - self.num_true
        lower = float(betaincinv(true, false + 1, 1 - confidence)) if true > 0 else 0.0
        upper = float(betaincinv(true + 1, false, confidence)) if false > 0 else 1.0
        return lower, upper

    def resized(self, num_samples: int) -> Self:
        return replace(self, num_samples=num_samples, num_true=self.value * num_samples)


@dataclass(frozen=True, slots=True)
class PairedLoss:
    """Loss of a right/wrong score over paired items: (num_lost - num_gained) / num_samples.

    num_lost: baseline right, candidate wrong. num_gained: the reverse. Floats only after `resized`.
    """

    num_samples: int
    num_lost: float
    num_gained: float

    @property
    def value(self) -> float:
        return (self.num_lost - self.num_gained) / self.num_samples

    def bounds(self, confidence: float) -> tuple[float, float]:
        return agresti_min_bounds(self.num_samples, self.num_lost, self.num_gained, confidence)

    def resized(self, num_samples: int) -> Self:
        factor = num_samples / self.num_samples
        return replace(
            self,
            num_samples=num_samples,
            num_lost=self.num_lost * factor,
            num_gained=self.num_gained * factor,
        )


@dataclass(frozen=True, slots=True)
class StratifiedLoss:
    """Macro average of paired losses over tasks; bounds by a stratified paired bootstrap.

    Resampling n items whose differences are +1, -1 or 0 is a multinomial draw over the three counts, so
    the counts are all that has to be kept.
    """

    strata: tuple[PairedLoss, ...]

    @property
    def num_samples(self) -> int:
        return sum(stratum.num_samples for stratum in self.strata)

    @property
    def value(self) -> float:
        return sum(stratum.value for stratum in self.strata) / len(self.strata)

    def draws(self) -> NDArray[np.float64]:
        """[_BOOTSTRAP_DRAWS] macro averages of resampled items; fixed seed."""
        generator = np.random.default_rng(_BOOTSTRAP_SEED)
        total = np.zeros(_BOOTSTRAP_DRAWS)
        for stratum in self.strata:
            share = np.array([stratum.num_lost, stratum.num_gained, 0.0]) / stratum.num_samples
            share[2] = max(0.0, 1.0 - share[0] - share[1])
            counts = generator.multinomial(stratum.num_samples, share, size=_BOOTSTRAP_DRAWS)
            total += (counts[:, 0] - counts[:, 1]) / stratum.num_samples
        mean: NDArray[np.float64] = total / len(self.strata)
        return mean

    def bounds(self, confidence: float) -> tuple[float, float]:
        lower, upper = np.quantile(self.draws(), [1.0 - confidence, confidence])
        return float(lower), float(upper)

    def resized(self, num_samples: int) -> Self:
        factor = num_samples / self.num_samples
        sizes = (max(2, round(stratum.num_samples * factor)) for stratum in self.strata)
        resized = (stratum.resized(size) for stratum, size in zip(self.strata, sizes, strict=True))
        return replace(self, strata=tuple(resized))


def student_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile of Student's t; it tends to the normal quantile as the degrees of freedom grow."""
    return float(stdtrit(degrees_of_freedom, probability))


def normal_quantile(probability: float) -> float:
    return float(ndtri(probability))


def mean_estimate(samples: Sequence[float] | NDArray[np.float64]) -> MeanEstimate:
    """Mean of independent samples, standard error sd / sqrt(n) with n - 1 in the sd."""
    values = np.asarray(samples, dtype=np.float64)
    num_samples = len(values)
    if num_samples == 0:
        return MeanEstimate(math.nan, None, 0)
    stderr = float(values.std(ddof=1)) / math.sqrt(num_samples) if num_samples > 1 else None
    return MeanEstimate(float(values.mean()), stderr, num_samples)


def exp_estimate(log_estimate: MeanEstimate) -> MeanEstimate:
    """exp of a mean of logarithms: the standard error by the delta method, bounds exact on the log."""
    value = float(np.exp(log_estimate.value))  # infinite rather than an OverflowError
    stderr = None if log_estimate.stderr is None else value * log_estimate.stderr
    return MeanEstimate(value, stderr, log_estimate.num_samples, scale="log")


def agresti_min_bounds(
    num_items: int, num_lost: float, num_gained: float, confidence: float
) -> tuple[float, float]:
    """Bounds of (lost - gained) / n for paired items, half an item added to each discordant count.

    Agresti and Min, Statistics in Medicine 24 (2005) 729: better coverage than Wald for small counts.
    """
    lost, gained, total = num_lost + 0.5, num_gained + 0.5, num_items + 2
    loss = (lost - gained) / total
    spread = math.sqrt(lost + gained - (lost - gained) ** 2 / total) / total
    reach = normal_quantile(confidence) * spread
    return loss - reach, loss + reach


def mcnemar_exact(num_lost: int, num_gained: int) -> float:
    """Two-sided exact p of `lost` and `gained` being equally likely (McNemar 1947)."""
    num_discordant = num_lost + num_gained
    tail = term = 1  # term: how many of the 2^n outcomes have k items on the rarer side
    for k in range(min(num_lost, num_gained)):
        term = term * (num_discordant - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << num_discordant))


def samples_to_decide(estimate: Estimate, limit: float, confidence: float) -> int | None:
    """Fewest samples at which `limit` would lie outside both bounds, were the proportions to stay.

    None when more than MAX_SAMPLES would be needed or the error cannot be estimated.
    """

    def is_decided(num_samples: int) -> bool:
        lower, upper = estimate.resized(num_samples).bounds(confidence)
        return not lower <= limit <= upper

    low = high = max(2, estimate.num_samples)
    while not is_decided(high):
        low, high = high, high * 2
        if high > MAX_SAMPLES:
            return None
    while high - low > max(1, high // 1000):  # three digits are more than the assumption is worth
        middle = (low + high) // 2
        low, high = (low, middle) if is_decided(middle) else (middle, high)
    return high
