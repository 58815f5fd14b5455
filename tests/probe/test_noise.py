"""Cheap noise must still be noise: size, shape, independence; and each perturbation's own formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import noisescope as ns
from noisescope.probe.draws import Draw, Rows, mix64


def draw_of(seed: int = 0, operator: str = "linear", place: int = 0, number: int = 1, **kwargs) -> Draw:
    key = ns.Site(operator, place, f"layers.{place}.{operator}").key(seed)
    return Draw(Rows(number), key, layout="plain", tensor="output", **kwargs)


SHAPE = (512, 1536)
N = SHAPE[0] * SHAPE[1]


def test_normality_and_moments():
    """Mean, variance, kurtosis and the whole distribution are those of N(0, 1)."""
    z = draw_of().normal(torch.empty(SHAPE)).double().flatten()
    assert abs(z.mean()) < 5 / N**0.5
    assert abs(z.std() - 1) < 5 / (2 * N) ** 0.5
    assert abs(stats.kurtosis(z.numpy())) < 5 * (24 / N) ** 0.5
    assert stats.kstest(z[::7].numpy(), "norm").pvalue > 1e-4


def max_correlation(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """|correlation| at lag 0, and the largest over all cyclic lags (by FFT)."""
    a, b = a.double().flatten(), b.double().flatten()
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    lags = torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b).conj(), n=a.numel()) / a.numel()
    return float(lags[0].abs()), float(lags.abs().max())


PAIRS = {
    "two operators": ({}, {"operator": "norm"}),
    "two layers": ({}, {"place": 1}),
    "two seeds": ({}, {"seed": 1}),
    "two forwards": ({}, {"number": 2}),
    "far seeds": ({"seed": 2**40}, {"seed": -(2**40)}),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_independence_over_all_lags(pair):
    """Two sites, seeds or forwards correlate no more than white noise does, at any lag."""
    a, b = (draw_of(**fields).normal(torch.empty(SHAPE)) for fields in pair)
    at_zero, largest = max_correlation(a, b)
    assert at_zero < 4 / N**0.5 and largest < 6 / N**0.5


def test_rows_are_independent_of_each_other():
    """Inside one tensor no lag but 0 correlates either."""
    z = draw_of().normal(torch.empty(SHAPE)).double().flatten()
    z = (z - z.mean()) / z.std()
    lags = torch.fft.irfft(torch.fft.rfft(z).abs().square(), n=N) / N
    assert lags[0] == pytest.approx(1, abs=1e-4) and lags[1:].abs().max() < 6 / N**0.5


def test_the_first_token_of_the_first_sample_is_no_special_case():
    """Sample 0 at position 0 draws different numbers at different sites, seeds and positions."""
    rows = Rows(1, torch.tensor([0, 1]), torch.arange(2)[None].expand(2, 2))
    like = torch.empty(2, 2, 64)
    sites = [ns.Site("linear", 0, "a").key(0), ns.Site("linear", 0, "b").key(0), ns.Site("linear", 0, "a").key(1)]
    first = [Draw(rows, key, layout="tokens", tensor="output").normal(like).reshape(4, 64) for key in sites]
    windows = torch.cat(first)
    assert windows.unique(dim=0).shape[0] == 12


def test_this_test_of_independence_can_fail():
    """A plain window on a tape, as a control: the lag test must find the shifted copy."""
    tape = torch.randn(N + 100, generator=torch.Generator().manual_seed(0))
    assert max_correlation(tape[:N], tape[100:])[1] > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 0.05, 0.2])
def test_size_before_and_after_the_cast(dtype, scale):
    """Within 1 % of s before the cast, of sqrt(s^2 + rounding^2) after it."""
    y = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).abs().add(0.5).to(dtype)
    noisy = ns.Gaussian(scale)(y, draw_of())
    assert noisy.dtype == dtype
    relative = noisy.double() / y.double() - 1
    if dtype in (torch.bfloat16, torch.float16):
        exact = y.double() * (1 + scale * draw_of().normal(y.float()).double())
        rounding = ((exact.to(dtype).double() - exact) / exact).std()
    else:
        rounding = torch.zeros(())
    assert relative.std() == pytest.approx(float((scale**2 + rounding**2) ** 0.5), rel=0.01)
    assert abs(relative.mean()) < 5 * scale / N**0.5 + 1e-4 * (dtype in (torch.bfloat16, torch.float16))


def test_rms_and_absolute_noise():
    """rms noise has the size s rms(y) per row, whatever the element; absolute noise has size s."""
    y = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 10, 512)[:, None]
    error = ns.Gaussian(0.05, relative_to="rms")(y, draw_of()) - y
    ratio = error.square().mean(1).sqrt() / y.square().mean(1).sqrt()
    assert torch.allclose(ratio, torch.tensor(0.05), rtol=0.15) and ratio.mean() == pytest.approx(0.05, rel=0.01)
    error = ns.Gaussian(0.05, relative_to="absolute")(y, draw_of()) - y
    assert error.std() == pytest.approx(0.05, rel=0.01)


def test_uniform_is_bounded_and_of_the_same_size():
    """Uniform noise has standard deviation s and never exceeds sqrt(3) s."""
    y = torch.ones(SHAPE)
    error = ns.Uniform(0.05)(y, draw_of()) - y
    assert error.std() == pytest.approx(0.05, rel=0.01) and error.abs().max() <= 0.05 * 3**0.5 * 1.001
    assert (
        stats.kstest(error.double().flatten()[::11].numpy(), "uniform", args=(-0.05 * 3**0.5, 0.1 * 3**0.5)).pvalue
        > 1e-4
    )


def test_bias_and_shrink_are_exact():
    """Systematic bias pushes away from zero, shrink pulls towards it, both deterministic."""
    y = torch.tensor([[-2.0, 0.0, 4.0]])
    draw = draw_of()
    assert torch.equal(ns.Bias(0.5)(y, draw), torch.tensor([[-2.5, 0.0, 4.5]]))
    assert torch.equal(ns.Bias(0.5, relative_to="element")(y, draw), y * 1.5)
    assert torch.allclose(ns.Bias(0.5, relative_to="rms")(y, draw), y + y.sign() * 0.5 * (20 / 3) ** 0.5)
    assert torch.equal(ns.Shrink(0.25)(y, draw), y * 0.75)


def test_zero_stays_zero_and_the_tensor_is_not_overwritten():
    """Relative noise leaves exact zeros alone, and writes in place only where it is told that it may."""
    y = torch.randn(4, 8)
    y[0, 0] = 0
    before = y.clone()
    noisy = ns.Gaussian(0.1)(y, draw_of())
    assert noisy[0, 0] == 0 and torch.equal(y, before)
    inplace = ns.Gaussian(0.1)(y, draw_of(overwrite=True))
    assert inplace is y and torch.equal(y, noisy)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=50, unique=True))
def test_mix64_is_injective(values):
    """The mixer is a bijection: different keys stay different."""
    assert mix64(torch.tensor(values)).unique().numel() == len(values)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    seed=st.integers(-(2**31), 2**31),
    scale=st.floats(0, 0.5),
)
def test_noise_is_finite_shaped_and_pure(rows, width, seed, scale):
    """Any shape, seed and scale: the same shape, finite, and the same numbers again."""
    y = torch.linspace(-3, 3, rows * width).reshape(rows, width)
    a, b = (ns.Gaussian(scale)(y, draw_of(seed=seed)) for _ in range(2))
    assert a.shape == y.shape and torch.isfinite(a).all() and torch.equal(a, b)


def test_empty_and_integer_tensors():
    """An empty tensor passes; an integer one is refused."""
    assert ns.Gaussian(0.1)(torch.empty(0, 8), draw_of()).shape == (0, 8)
    with pytest.raises(ns.InvalidInput, match="floating-point"):
        draw_of().normal(torch.zeros(2, 2, dtype=torch.int64))
