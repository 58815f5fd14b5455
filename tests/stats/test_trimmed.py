"""Differences of trimmed means: right size under heavy tails, sharper than plain means, honest where nothing varies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as reference

from noisescope.stats import trimmed_shift


def test_agrees_with_yuens_test():
    """The interval leaves 0 out exactly where scipy's trimmed t test finds a difference."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_t(3, 40), draw.standard_t(3, 55) * 2 + 0.5
    expected = reference.ttest_ind(y, x, equal_var=False, trim=0.2)
    shift = trimmed_shift(x, y, paired=False)
    assert shift.value / shift.error == pytest.approx(expected.statistic)
    assert shift.freedom == pytest.approx(expected.df)
    barely = shift.estimate(1 - expected.pvalue)
    assert min(abs(barely.low), abs(barely.high)) < 1e-6 and shift.n == 40


def test_covers_under_heavy_skewed_tails():
    """Mixtures with a few values far out: 95 % of 500 intervals hold no difference, give or take."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(500):
        x, y = (draw.normal(0, 0.2, 50) + draw.exponential(1.5, 50) * (draw.random(50) < 0.05) for _ in range(2))
        found = trimmed_shift(x, y, paired=False).estimate()
        held += found.low <= 0 <= found.high
    assert 460 <= held <= 490


def test_pairs_are_sharper():
    """What differs between samples drops out; one value far out changes little."""
    draw = np.random.default_rng(2)
    x = draw.normal(0, 2, 50)
    y = x + 0.3 + draw.normal(0, 0.05, 50)
    y[0] += 100
    paired, apart = (trimmed_shift(x, y, paired=choice) for choice in (True, False))
    assert paired.value == pytest.approx(0.3, abs=0.03) and paired.error < apart.error / 10
    assert paired.smallest_detectable() < 0.1 < apart.smallest_detectable()


def test_nothing_that_varies():
    """Pairs that are all alike keep a width; constant sets, or single values, have no interval."""
    x = np.linspace(0, 1, 20)
    alike = trimmed_shift(x, x, paired=True).estimate()
    assert alike.value == 0 and alike.low < 0 < alike.high
    for sizes, paired in (((5, 6), False), ((1, 1), True)):
        a, b = (np.ones(size) for size in sizes)
        lone = trimmed_shift(a, b, paired=paired)
        assert lone.estimate().low is None and lone.smallest_detectable() is None
