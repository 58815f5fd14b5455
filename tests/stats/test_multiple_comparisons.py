"""The largest of several effects: an interval and a size that allow for the choice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from noisescope import stats
from noisescope.errors import InvalidInput

Array = NDArray[np.float64]


def windows(rng: np.random.Generator, n: int, losses: Array) -> tuple[Array, list[Array]]:
    """0/1 scores with 3 seeds; every sample has its own frailty."""
    clean = (rng.random(n) < 0.9).astype(float)
    frailty = math.sqrt(0.4) * rng.normal(size=(1, n, 1))
    noise = frailty + math.sqrt(0.6) * rng.normal(size=(len(losses), n, 3))
    lost = noise > scipy.stats.norm.isf(losses)[:, None, None]
    return clean, [clean[:, None] * (1 - one) for one in lost]


def test_size_is_cross_fitted_by_hand() -> None:
    """For each tenth of the samples the window is chosen on the rest; the size is the loss of those choices."""
    clean, noisy = windows(np.random.default_rng(0), 60, np.full(6, 0.15))
    losses = np.stack([clean - one.mean(axis=1) for one in noisy])
    kept = np.empty(60)
    for fold in range(10):
        inside = np.arange(60) % 10 == fold
        best = int(np.argmax(losses[:, ~inside].mean(axis=1)))
        kept[inside] = noisy[best].mean(axis=1)[inside]
    found = stats.select_largest(clean, noisy)
    assert found.index == int(np.argmax(losses.mean(axis=1)))
    assert found.estimate.value == pytest.approx(1 - kept.mean() / clean.mean())
    assert found.estimate.value < found.observed.value  # type: ignore[operator]
    assert found.candidates == 6 and 0 < found.agreement <= 1


def test_the_lower_end_is_bonferronis_and_the_upper_one_its_own() -> None:
    """Only the lower end pays for the choice."""
    clean, noisy = windows(np.random.default_rng(1), 100, np.linspace(0.05, 0.3, 14))
    found = stats.select_largest(clean, noisy)
    strict = stats.degradation(clean, noisy[found.index], level=1 - 0.05 / 14)
    plain = stats.degradation(clean, noisy[found.index])
    assert found.observed == plain
    assert (found.estimate.low, found.estimate.high) == (strict.low, plain.high)
    assert (found.estimate.method, found.estimate.n, found.estimate.level) == ("simultaneous", 100, 0.95)


def test_one_candidate_is_no_choice() -> None:
    """With one candidate nothing is corrected; without a clean score above chance nothing is measurable."""
    clean, noisy = windows(np.random.default_rng(2), 50, np.array([0.2]))
    found = stats.select_largest(clean, noisy)
    assert found.estimate == found.observed == stats.degradation(clean, noisy[0])
    nothing = stats.select_largest(np.zeros(20), [np.zeros(20), np.zeros(20)])
    assert (nothing.estimate.value, nothing.estimate.note) == (None, stats.NOT_MEASURABLE)
    with pytest.raises(InvalidInput, match="no candidates were given"):
        stats.select_largest(clean, [])


def test_the_same_data_pick_the_same() -> None:
    """Nothing is drawn: twice the same call, twice the same answer; an order of candidates does not matter."""
    clean, noisy = windows(np.random.default_rng(3), 80, np.linspace(0.05, 0.3, 5))
    found, again = stats.select_largest(clean, noisy), stats.select_largest(clean, noisy[::-1])
    assert found == stats.select_largest(clean, noisy)
    assert again.index == 4 - found.index
    assert again.estimate.low == found.estimate.low


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["equal", "spread", "leading"])
def test_the_picked_window_is_covered_and_not_inflated(truth: str) -> None:
    """Fourteen windows: coverage at least 93 %, size within 10 %, at most 1.7 times as wide; the plain one fails."""
    losses = {
        "equal": np.full(14, 0.1),
        "spread": np.linspace(0.02, 0.2, 14),
        "leading": np.where(np.arange(14) == 3, 0.3, 0.1),
    }[truth]
    rng = np.random.default_rng(5)
    covered, plain, sizes, naive, widths = [], [], [], [], []
    for _ in range(300):
        found = stats.select_largest(*windows(rng, 100, losses))
        true, new, old = losses[found.index], found.estimate, found.observed
        assert new.value and new.low is not None and new.high is not None
        assert old.value and old.low is not None and old.high is not None
        covered.append(new.low <= true <= new.high)
        plain.append(old.low <= true <= old.high)
        sizes.append(new.value / true)
        naive.append(old.value / true)
        widths.append((new.high - new.low) / (old.high - old.low))
    assert np.mean(covered) >= 0.93
    assert 0.9 <= np.mean(sizes) <= 1.1
    assert np.median(widths) <= 1.7
    if truth == "equal":
        assert np.mean(plain) < 0.9 and np.mean(naive) > 1.2
