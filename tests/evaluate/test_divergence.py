"""Divergence against sums written out by hand, and token-level metrics against numbers that are known."""

import math

import numpy as np
import pytest
import torch

from bitsmith.core.errors import WorkFailed
from bitsmith.evaluate import divergence
from bitsmith.evaluate.divergence import TokenScores, compare_logits
from bitsmith.evaluate.token_level import check_repeatable, token_measurements

BASELINE = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
CANDIDATE = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]).log()


def test_against_the_sum_written_out() -> None:
    scores = compare_logits(BASELINE, CANDIDATE + 3.0, torch.tensor([0, 2]))  # logits may be shifted
    assert scores.kl == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0], abs=1e-7)
    assert scores.baseline_logprob == pytest.approx([math.log(0.5), math.log(0.8)], abs=1e-6)
    assert scores.candidate_logprob == pytest.approx([math.log(0.25), math.log(0.8)], abs=1e-6)
    assert scores.same_top1.tolist() == [0.0, 1.0]
    assert scores.delta_p == pytest.approx([-0.25, 0.0], abs=1e-7)


def test_slices_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    first, second = torch.randn(37, 50), torch.randn(37, 50)
    targets = torch.randint(50, (37,))
    whole = compare_logits(first, second, targets)
    monkeypatch.setattr(divergence, "_SLICE_BYTES", 8 * 50 * 5)  # five rows at a time
    sliced = compare_logits(first, second, targets)
    assert (whole.kl == sliced.kl).all()
    assert (whole.candidate_logprob == sliced.candidate_logprob).all()


def test_equal_logits_diverge_by_nothing() -> None:
    logits = torch.randn(20, 1000) * 8
    scores = compare_logits(logits, logits.clone(), torch.zeros(20, dtype=torch.int64))
    assert scores.kl.max() == 0.0
    assert scores.same_top1.all()


def test_a_token_that_only_the_candidate_rules_out_is_infinitely_far() -> None:
    ruled_out = CANDIDATE.clone()
    ruled_out[0, 0] = -torch.inf
    assert compare_logits(BASELINE, ruled_out, torch.tensor([1, 1])).kl[0] == math.inf
    # The other way round the term is 0: the baseline never goes there.
    assert math.isfinite(compare_logits(ruled_out, BASELINE, torch.tensor([1, 1])).kl[0])


def test_nan_logits_stay_nan() -> None:
    broken = CANDIDATE.clone()
    broken[1, 1] = torch.nan
    scores = compare_logits(BASELINE, broken, torch.tensor([0, 1]))
    assert np.isnan([scores.kl[1], scores.same_top1[1], scores.candidate_logprob[1], scores.delta_p[1]]).all()
    assert np.isfinite([scores.kl[0], scores.same_top1[0]]).all()


def _window(ln_drop: float, kl: float, same: list[bool]) -> TokenScores:
    baseline = np.full(4, -2.0)
    return TokenScores(baseline, baseline - ln_drop, np.full(4, kl), np.array(same, dtype=np.float64))


def test_metrics_of_known_windows() -> None:
    windows = [_window(0.1, 0.02, [True] * 4), _window(0.3, 0.04, [True, True, False, False])]
    metrics = {m.metric.name: m.metric for m in token_measurements(windows)}
    assert metrics["baseline_perplexity"].value == pytest.approx(math.exp(2.0))
    assert metrics["perplexity"].value == pytest.approx(math.exp(2.2))
    assert metrics["perplexity_ratio"].value == pytest.approx(math.exp(0.2))
    assert metrics["ln_perplexity_difference"].stderr == pytest.approx(0.1)  # by window, not by token
    assert metrics["perplexity_ratio"].stderr == pytest.approx(0.1 * math.exp(0.2))
    assert metrics["kl_mean"].value == pytest.approx(0.03)
    assert metrics["kl_mean"].num_samples == 2
    assert metrics["top1_agreement"].value == pytest.approx(0.75)
    deltas = [math.exp(-2.1) - math.exp(-2), math.exp(-2.3) - math.exp(-2)]
    assert metrics["rms_delta_p"].value == pytest.approx(math.sqrt((deltas[0] ** 2 + deltas[1] ** 2) / 2))
    assert metrics["mean_delta_p"].value == pytest.approx(sum(deltas) / 2)


def test_pairing_shrinks_the_error() -> None:
    generator = np.random.default_rng(0)
    windows = []
    for level in generator.normal(-3, 0.5, size=30):  # windows differ much in difficulty
        baseline = level + generator.normal(0, 0.1, size=50)
        drop = 0.01 + generator.normal(0, 0.005, size=50)
        windows.append(TokenScores(baseline, baseline - drop, np.zeros(50), np.ones(50)))
    metrics = {m.metric.name: m.metric for m in token_measurements(windows)}
    paired, unpaired = metrics["ln_perplexity_difference"], metrics["perplexity"]
    assert paired.stderr is not None and unpaired.stderr is not None
    assert paired.stderr * 50 < unpaired.stderr / unpaired.value


class _Named:
    name = "shaky"
    vocab_size = max_model_len = 1

    def score(self, requests: object) -> object:
        raise AssertionError


@pytest.mark.parametrize("noise", [1e-5, math.nan])
def test_a_baseline_that_differs_from_itself_is_no_baseline(noise: float) -> None:
    check_repeatable(_Named(), 9e-7)  # type: ignore[arg-type]
    with pytest.raises(WorkFailed, match="shaky differs from itself"):
        check_repeatable(_Named(), noise)  # type: ignore[arg-type]
