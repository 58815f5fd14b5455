"""Signals against float64 formulas written out; what has no value; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noisescope.compat.diagnostic.metrics import (
    compute_correlation,
    compute_gradient_ratio,
    compute_mae,
    compute_mape,
    compute_max_error,
    compute_snr,
    compute_sparsity,
)
from noisescope.errors import InvalidInput

SLOW: dict[Callable[[Tensor, Tensor], float | None], Callable[[np.ndarray, np.ndarray], float]] = {
    compute_snr: lambda x, y: 10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()),
    compute_mae: lambda x, y: np.abs(x - y).mean(),
    compute_mape: lambda x, y: (np.abs(x - y) / (np.abs(x) + 1e-8)).mean(),
    compute_max_error: lambda x, y: np.abs(x - y).max(),
    compute_correlation: lambda x, y: np.corrcoef(x, y)[0, 1],
}


def pair(*shape: int, seed: int = 0, noise: float = 0.1, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(*shape, generator=generator) + offset
    return clean, clean + noise * torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("measure", SLOW, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_each_measure_is_its_formula(measure, dtype: torch.dtype) -> None:
    """In any dtype and layout: numpy's float64 value, as a plain float."""
    clean, noisy = (x.to(dtype).transpose(0, 1) for x in pair(7, 33, 3))
    value = measure(clean, noisy)
    assert type(value) is float
    x, y = (z.double().flatten().numpy() for z in (clean, noisy))
    assert value == pytest.approx(float(SLOW[measure](x, y)), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.floats(-4, 4), st.floats(-1e4, 1e4), st.integers(0, 99))
def test_any_tensors(size: int, log_noise: float, offset: float, seed: int) -> None:
    """Whatever the size of noise and offset."""
    clean, noisy = pair(size, seed=seed, noise=10**log_noise, offset=offset)
    x, y = clean.double().numpy(), noisy.double().numpy()
    for measure, slow in SLOW.items():
        value = measure(clean, noisy)
        if value is not None:  # noise that float32 rounded away
            assert value == pytest.approx(float(slow(x, y)), rel=1e-7, abs=1e-9), measure.__name__


def test_large_sums_keep_their_digits() -> None:
    """Half-precision tensors whose squares and sums would overflow in their own dtype."""
    clean = torch.full((70_000,), 300.0, dtype=torch.float16)
    noisy = clean * 1.125
    assert compute_snr(clean, noisy) == pytest.approx(20 * math.log10(8), rel=1e-9)
    assert compute_mae(clean, noisy) == 37.5


def test_an_offset_leaves_the_correlation() -> None:
    """A mean far above the spread, which a one-pass formula in float32 would lose."""
    clean, noisy = (x.double() for x in pair(5000))
    assert compute_correlation(clean + 1e6, noisy + 1e6) == pytest.approx(compute_correlation(clean, noisy), abs=1e-9)


def test_what_has_no_value() -> None:
    """Identical tensors have no noise, constants no correlation; a gain is invisible to a correlation."""
    clean, noisy = pair(50)
    constant = torch.full((50,), 0.1)
    assert compute_snr(clean, clean.clone()) is None
    assert compute_snr(torch.zeros(50), noisy) == -math.inf
    assert compute_snr(torch.zeros(50), torch.zeros(50)) is None
    assert compute_correlation(clean, constant) is None and compute_correlation(constant, clean) is None
    assert compute_correlation(clean, 3 * clean) == pytest.approx(1) and compute_correlation(
        clean, -clean
    ) == pytest.approx(-1)


def test_snr_is_measured_and_the_nominal_one_is_not() -> None:
    """Relative noise of 5 % at its own place has both at 26 dB; the nominal formula sees nothing but the scale."""
    clean, z = pair(200_000)
    assert compute_snr(torch.ones(3), 0.05) == pytest.approx(26.02, abs=0.01)
    assert compute_snr(clean, clean + 0.05 * clean * (z - clean) / 0.1) == pytest.approx(26.02, abs=0.2)
    assert compute_snr(torch.ones(3), 0.0) is None and compute_snr(torch.ones(3), 1) == 0
    with pytest.raises(InvalidInput, match="noise scale must be finite and at least 0, got -1"):
        compute_snr(torch.ones(3), -1)


def test_sparsity() -> None:
    """Absolute by default; relative to the rms, so that a unit of measurement doesn't matter."""
    x = torch.tensor([0.0, 1e-7, -1e-7, 1e-3, -1.0, 2.0, 3.0, 4.0])
    assert compute_sparsity(x) == 3 / 8
    assert compute_sparsity(x, 0.5) == 4 / 8
    assert (
        compute_sparsity(x, relative=0.01)
        == compute_sparsity(x * 1e-5, relative=0.01)
        == compute_sparsity(x * 1e5, relative=0.01)
        == 4 / 8
    )
    assert compute_sparsity(x * 1e-7) == 1
    assert compute_sparsity(torch.zeros(4), relative=0.01) == compute_sparsity(torch.zeros(4)) == 1
    silu = torch.nn.functional.silu(pair(100_000)[0] * 3)
    assert compute_sparsity(silu) < 1e-4 and compute_sparsity(silu, relative=0.1) > 0.1
    with pytest.raises(InvalidInput, match="relative must be finite"):
        compute_sparsity(x, relative=math.nan)


def test_gradient_ratio() -> None:
    """Noisy over clean, whatever its size; nothing over a clean gradient of 0; refused where it is not finite."""
    model = torch.nn.Linear(1, 1, bias=False)

    def loss(factor: float) -> Callable[[torch.nn.Linear], Tensor]:
        return lambda inner: factor * inner.weight.sum()

    assert compute_gradient_ratio(model, loss(2e9), loss(3e9)) == 1.5
    assert compute_gradient_ratio(model, loss(0.0), loss(3.0)) is None
    with pytest.raises(InvalidInput, match="norms must be finite, got inf under noise and 1 without"):
        compute_gradient_ratio(model, loss(1.0), loss(math.inf))


@pytest.mark.parametrize("measure", SLOW, ids=lambda f: f.__name__)
def test_refusals(measure) -> None:
    """Another shape, an empty tensor and numbers that are not finite are refused, and the message says whose."""
    clean, noisy = pair(4, 5)
    with pytest.raises(InvalidInput, match=r"have the shape \(4, 5\), \w+ \(5, 4\)"):
        measure(clean, noisy.T)
    with pytest.raises(InvalidInput, match="activations must be a non-empty tensor"):
        measure(clean[:0], noisy[:0])
    for bad in (math.nan, math.inf, -math.inf):
        broken = clean.clone()
        broken[3, 4] = bad
        for pairs, name in (((broken, noisy), "activations"), ((noisy, broken), "npu_activations|noise_scale")):
            with pytest.raises(InvalidInput, match=f"({name}) contain NaN or infinity"):
                measure(*pairs)
        with pytest.raises(InvalidInput, match="activations contain NaN or infinity"):
            compute_sparsity(broken)
