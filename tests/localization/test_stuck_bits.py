"""A bit that never changes is distinguished from bits that healthy arithmetic leaves at 0 and from chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom

from noisescope.localization.host_operators import recompute
from noisescope.localization.host_products import Rows
from noisescope.localization.roundoff_floors import Reference, sum_grain
from noisescope.localization.stuck_bits import CHANCE, _by_chance, stuck_channels

ROWS, WIDTH = 64, 48


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_stuck_bit(y: torch.Tensor, bit: int, value: int, channels: slice) -> torch.Tensor:
    """y with a bit of some channels at 0 or 1."""
    y = y.clone()
    pattern = y.view({2: torch.int16, 4: torch.int32}[y.dtype.itemsize])
    pattern[:, channels] = pattern[:, channels] | (1 << bit) if value else pattern[:, channels] & ~(1 << bit)
    return y


def stuck(y: torch.Tensor, values: torch.Tensor, grain: torch.Tensor | None = None) -> tuple[bool, list[int]]:
    return stuck_channels(y, Reference(values, (), grain=grain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bit", "value"), [(0, 1), (0, 0), (5, 0), (5, 1)])
def test_a_stuck_bit_is_seen_in_its_channel_and_in_the_whole(dtype, bit, value):
    """One lane names its channels; a bit stuck everywhere is also one of the whole output."""
    values = drawn(3 * ROWS, WIDTH)
    whole, channels = stuck(with_stuck_bit(values.to(dtype), bit, value, slice(5, None, 16)), values)
    assert (whole, channels) == (False, [5, 21, 37])
    whole, channels = stuck(with_stuck_bit(values.to(dtype), bit, value, slice(None)), values)
    assert whole and len(channels) == WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_healthy_bits_are_left_alone(dtype):
    """Whatever the numbers have in common: a sign, a size, few digits, or that they hardly vary."""
    kinds = {
        "plain": drawn(ROWS, WIDTH),
        "positive": drawn(ROWS, WIDTH).abs() + 1,
        "few digits": (drawn(ROWS, WIDTH) * 8).round() / 8,
        "hardly varying": 1 + 1e-9 * drawn(ROWS, WIDTH),
        "near a power of two": 2 * (1 + 1e-4 * drawn(ROWS, WIDTH)),
    }
    for kind, values in kinds.items():
        error = 2 * torch.finfo(dtype).eps * drawn(ROWS, WIDTH, seed=1) * values.abs()
        assert stuck((values + error).to(dtype), values) == (False, []), kind


def cancelling() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weights and output of a float32 linear whose two halves, a thousand each, cancel to about one."""
    x, w = drawn(2 * ROWS, 64).float(), drawn(WIDTH, 64, seed=1).float()
    x[:, 0] = 1000 + x[:, 0]
    x[:, 32] = x[:, 0]
    w[:, 0], w[:, 32] = 1.0, -1.0
    return x, w, F.linear(x[:, :32], w[:, :32]) + F.linear(x[:, 32:], w[:, 32:])


def judged(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[bool, list[int]]:
    return stuck_channels(y, recompute("linear", F.linear, (x, w), {}, y, Rows(2 * ROWS, 0)).reference)


def test_zeros_that_cancellation_leaves_are_no_stuck_bits():
    """All low bits of every row are 0 on a healthy device, and the exact values know nothing of that."""
    x, w, y = cancelling()
    assert not bool((y.view(torch.int32) & 7).any())
    exact = x.double() @ w.double().T
    assert stuck(y, exact)[0]  # what the test would say without the spacing of the partial sums
    assert judged(x, w, y) == (False, [])


def test_among_such_zeros_a_one_and_a_higher_zero_are_still_seen():
    """Cancellation never leaves ones, and nothing above the spacing of the largest partial sum."""
    x, w, y = cancelling()
    assert judged(x, w, with_stuck_bit(y, 0, 1, slice(7, 8))) == (False, [7])
    assert judged(x, w, with_stuck_bit(y, 18, 0, slice(7, 8))) == (False, [7])


@given(st.integers(1, 60), st.data())
def test_the_chance_is_that_of_two_samples(n, data):
    """Fisher's exact test: all m ones of 2n bits lie among the n of the reference; and 2^-n at the least."""
    m = data.draw(st.integers(0, n))
    expected = np.array([1] * m + [0] * (n - m))
    assert _by_chance(expected, 0) == pytest.approx(max(hypergeom(2 * n, m, n).pmf(m), 0.5**n), rel=1e-6)


def test_the_chance_of_fair_bits_is_never_below_what_it_says():
    """Of eight fair coins and eight others, the first are all 0 as often as the formula says, over all outcomes."""
    n, draws = 8, 200_000
    coins = np.random.default_rng(0).integers(0, 2, (draws, 2, n))
    levels = np.array([_by_chance(row, 0) for row in coins[:, 1]])
    for level in (0.05, 0.005, 0.0005):
        alarms = ((coins[:, 0].sum(1) == 0) & (levels < level)).mean()
        assert alarms <= level


def test_few_rows_tell_nothing():
    """Thirty-three rows that all share a bit are no alarm, for so they may be by chance in ten million tests."""
    values = drawn(33, 2000)
    assert stuck(with_stuck_bit(values.float(), 0, 1, slice(None)), values)[1] == []
    assert _by_chance(np.ones(34), 0) < CHANCE < _by_chance(np.ones(33), 0)


def test_probabilities_that_are_one_say_nothing():
    """A softmax that has decided is 1, 0, 0 ... for ever; its other numbers are looked at as a whole."""
    values = torch.softmax(6 * drawn(ROWS, WIDTH), -1)
    values[:, 0] = 1.0
    y = values.float()
    assert stuck_channels(y, Reference(values, ()), below_one=True) == (False, [])
    assert stuck_channels(with_stuck_bit(y, 0, 1, slice(1, None)), Reference(values, ()), below_one=True) == (True, [])


def test_the_grain_bounds_every_partial_sum():
    """In the given order, from behind and by halves: none is larger than the grain says."""
    terms = drawn(200, 64) * torch.exp(3 * drawn(1, 64, seed=2))
    grain = sum_grain(64, terms.square().sum(1), terms.sum(1), 2.0**-24)
    for order in (terms, terms.flip(1), terms.sort(1).values):
        assert bool((order.cumsum(1).abs().amax(1) * 2.0**-23 <= grain).all())


def test_bits_of_a_bias_are_no_stuck_bits():
    """A coarse sum and a finer bias cancel: the low bits are the bias's, in every row, 1s among them."""
    bias = torch.full((WIDTH,), 3 + 2.0**-20, dtype=torch.float64)  # its last bits are ...0100
    coarse = 2.0**-12 * torch.randint(1, 4096, (3 * ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).double()
    y = (bias - 4 + coarse).float()
    values = y.double() + 2.0**-14 * drawn(3 * ROWS, WIDTH)  # what the host says, below the sum's spacing
    grain = torch.full_like(values, 2.0**-11)
    assert stuck_channels(y, Reference(values, (), grain=grain))[1]
    assert stuck_channels(y, Reference(values, (), grain=grain, offset=True)) == (False, [])
    faulty = with_stuck_bit(y, 20, 1, slice(3, 4))
    assert stuck_channels(faulty, Reference(values, (), grain=grain, offset=True))[1] == [3]


def test_a_closed_gate_is_no_stuck_bit():
    """gelu: 1 + erf(x) is 0 below about -5.5 in float32, where the exact result is only tiny."""
    x = drawn(2 * ROWS, WIDTH).float()
    x[:, 3] = -5.8 - x[:, 3].abs() / 4
    operator = recompute("gelu", F.gelu, (x,), {}, F.gelu(x), Rows(2 * ROWS, 0))
    assert bool((operator.y[:, 3] == 0).all()) and bool((operator.reference.values[:, 3] != 0).all())
    assert stuck_channels(operator.y, operator.reference) == (False, [])
    broken = with_stuck_bit(operator.y, 4, 0, slice(7, 8))
    assert stuck_channels(broken, operator.reference) == (False, [7])
