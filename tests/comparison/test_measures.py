"""Measures of difference against slow, obvious formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noisescope.comparison.measures import ErrorSums, from_sketches, spacing


def pair(seed: int, scale: float, shape=(3, 5, 8)) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    a = draw.standard_normal(shape)
    return a, a + scale * draw.standard_normal(shape)


def measured(a, b, dtype="float32", pieces=1):
    sums = ErrorSums()
    parts = list(zip(np.array_split(a, pieces), np.array_split(b, pieces), strict=True))
    for first, (x, y) in enumerate(parts):
        sums.add(first * len(x), x, y, dtype)
    for x, y in parts:
        sums.add_percent(x, y)
    return sums


@given(st.integers(0, 1000), st.floats(1e-6, 2.0))
def test_measures_are_what_their_names_say(seed, scale):
    """Whether the tensors come at once or prompt by prompt."""
    a, b = pair(seed, scale)
    found = measured(a, b, pieces=1).measures()
    d = np.abs(a - b)
    rms = np.sqrt((a**2).mean())
    assert found.mae == pytest.approx(d.mean())
    assert found.mape == pytest.approx((d / np.maximum(np.abs(a), 0.1 * rms)).mean())
    assert found.mape_notes == pytest.approx((d / (np.abs(a) + 1e-8)).mean())
    assert found.pearson == pytest.approx(np.corrcoef(a.ravel(), b.ravel())[0, 1], abs=1e-9)
    assert found.cosine == pytest.approx((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert found.max_error == d.max()
    split = measured(a, b, pieces=3).measures()
    for name in ("mae", "mape", "relative_l2", "max_ulp"):
        assert getattr(split, name) == pytest.approx(getattr(found, name))
    assert split.where == found.where


def test_the_largest_error_is_found_where_it_lies():
    """Prompt, token and channel; and whether the channel is an outlier."""
    a, b = pair(0, 0.0)
    b[2, 4, 3] += 7.0
    where = measured(a, b).measures().where
    assert (where.prompt, where.token, where.channel) == (2, 4, 3) and not where.outlier_channel
    a[:, :, 3] += 1000.0
    b = a.copy()
    b[1, 0, 3] += 7.0
    found = measured(a, b)
    assert found.measures().where.outlier_channel
    assert max(found.tokens, key=found.tokens.get) == (1, 0)


def test_elements_near_zero_do_not_rule():
    """One element of 1e-7 that is off by 1e-3: the notes' MAPE explodes, the honest one does not."""
    a, _ = pair(1, 0.0)
    a[0, 0, 0] = 1e-7
    b = a.copy()
    b[0, 0, 0] += 1e-3
    found = measured(a, b).measures()
    assert found.mape_notes > 10 and found.mape < 1e-3


@given(
    st.floats(-1e30, 1e30).filter(lambda v: v == 0 or abs(v) > 1e-30),
    st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
)
def test_an_ulp_is_the_distance_to_the_next_number(value, name):
    """Of the tensor's own dtype, subnormals included."""
    dtype = getattr(torch, name)
    number = torch.tensor(value, dtype=torch.float64).to(dtype)
    if not number.isfinite() or number.abs() == torch.finfo(dtype).max:
        return
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[number.element_size()]
    following = (number.abs().view(whole) + 1).view(dtype)
    assert float(spacing(np.array(float(number)), name)) == float(following) - abs(float(number))


@pytest.mark.parametrize("pair_of_values", [(1.0, np.nan), (np.inf, 1.0), (np.inf, -np.inf), (np.nan, np.inf)])
def test_nan_on_one_side_is_infinitely_far(pair_of_values):
    """So is an infinity, or another one; nothing is measured then, and the count is given."""
    a, b = pair(2, 0.0)
    a[0, 0, 0], b[0, 0, 0] = pair_of_values
    sums = measured(a, b)
    found = sums.measures()
    assert math.isinf(found.size) and found.relative_l2 is None and not found.measurable
    assert (found.nonfinite, found.nonfinite_both, found.elements) == (1, 0, a.size)
    assert {getattr(found, name) for name in ("mae", "mape", "mape_notes", "pearson", "cosine", "max_error")} == {None}
    assert max(sums.tokens, key=sums.tokens.get) == (0, 0) and math.isinf(sums.tokens[0, 0])


def test_nan_on_both_sides_is_left_out():
    """Averages are of the finite rest alone; where none is left nothing is measured."""
    a, b = pair(2, 0.1)
    rest = measured(a[:, :, 2:], b[:, :, 2:]).measures()
    a[:, :, 0] = b[:, :, 0] = np.nan
    a[:, :, 1] = b[:, :, 1] = np.inf
    found = measured(a, b, pieces=3).measures()
    assert (found.nonfinite, found.nonfinite_both, found.elements) == (0, 30, 120)
    for name in ("relative_l2", "mae", "mape", "mape_notes", "pearson", "cosine", "mean_ulp"):
        assert getattr(found, name) == pytest.approx(getattr(rest, name)), name
    nothing = measured(np.full_like(a, np.nan), np.full_like(a, np.nan)).measures()
    assert nothing.size is None and nothing.mape is None and nothing.pearson is None and not nothing.measurable


def test_anything_is_infinitely_far_from_zeros():
    """Two zero tensors are alike; a difference beside a reference of zeros has no relative size."""
    zeros, ones = np.zeros((1, 2, 3)), np.ones((1, 2, 3))
    same, apart = measured(zeros, zeros).measures(), measured(zeros, ones).measures()
    assert (same.size, same.infinite) == (0.0, False)
    assert (apart.relative_l2, apart.size, apart.nonfinite, apart.measurable) == (None, math.inf, 0, True)
    by_sketch = from_sketches((zeros[0], np.zeros(2)), (ones[0], np.ones(2)), 6)
    assert (by_sketch.relative_l2, by_sketch.infinite) == (None, True)


def sketched(a, b):
    """From sketches that estimate their tensors' norms without an error."""
    return from_sketches((a, np.linalg.norm(a, axis=1)), (b, np.linalg.norm(b, axis=1)), a.size)


def test_sketches_show_sizes_and_nothing_else():
    """Relative L2 and cosine with their standard error; the rest needs whole tensors."""
    a, b = pair(3, 0.1, (16, 31))
    found = sketched(a, b)
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert (found.mae, found.mape, found.pearson, found.max_error, found.max_ulp) == (None,) * 5
    b[0, 0] = np.inf
    found = sketched(a, b)
    assert math.isinf(found.size) and (found.nonfinite, found.cosine) == (1, None)
    a[0, 0] = np.inf
    found = sketched(a, b)
    assert found.relative_l2 == pytest.approx(0.1, rel=0.2) and (found.nonfinite, found.nonfinite_both) == (0, 1)
    assert sketched(np.full_like(a, np.nan), np.full_like(a, np.nan)).relative_l2 is None


def test_the_error_of_a_sketch_is_what_it_says():
    """The standard deviation over many sketches of |d| / |a|; |a| is known."""
    draw = np.random.default_rng(4)
    found = []
    for _ in range(2000):  # a sketch's numbers are sums of many signed elements: normal, whatever was sketched
        a, d = draw.standard_normal((2, 4, 31))
        norms = np.full(4, math.sqrt(31))
        found.append(from_sketches((a, norms), (a + 0.1 * d, norms), 4 * 31))
    spread = float(np.std([one.relative_l2 for one in found])) / 0.1
    assert found[0].relative_error == pytest.approx(spread, rel=0.1)
