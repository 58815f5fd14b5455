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

from noisescope.errors import InvalidInput
from noisescope.measures import tensor_errors
from noisescope.measures.tensor_errors import (
    gradient_ratio,
    mae,
    mape,
    max_error,
    nominal_snr_db,
    pearson,
    snr_db,
    sparsity,
)

SLOW: dict[Callable[[Tensor, Tensor], float | None], Callable[[np.ndarray, np.ndarray], float]] = {
    snr_db: lambda x, y: 10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()),
    mae: lambda x, y: np.abs(x - y).mean(),
    mape: lambda x, y: (np.abs(x - y) / (np.abs(x) + 1e-8)).mean(),
    max_error: lambda x, y: np.abs(x - y).max(),
    pearson: lambda x, y: np.corrcoef(x, y)[0, 1],
}


def pair(*shape: int, seed: int = 0, noise: float = 0.1, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(*shape, generator=generator) + offset
    return clean, clean + noise * torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("measure", SLOW, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_each_measure_is_its_formula(measure, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any dtype and layout, with chunks that don't divide the size: numpy's float64 value, as a plain float."""
    monkeypatch.setattr(tensor_errors, "_CHUNK", 100)
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
    assert snr_db(clean, noisy) == pytest.approx(20 * math.log10(8), rel=1e-9)
    assert mae(clean, noisy) == 37.5


def test_an_offset_leaves_the_correlation() -> None:
    """A mean far above the spread, which a one-pass formula in float32 would lose."""
    clean, noisy = (x.double() for x in pair(5000))
    assert pearson(clean + 1e6, noisy + 1e6) == pytest.approx(pearson(clean, noisy), abs=1e-9)


def test_what_has_no_value() -> None:
    """Identical tensors have no noise, constants no correlation; a gain is invisible to a correlation."""
    clean, noisy = pair(50)
    constant = torch.full((50,), 0.1)
    assert snr_db(clean, clean.clone()) is None
    assert snr_db(torch.zeros(50), noisy) == -math.inf
    assert snr_db(torch.zeros(50), torch.zeros(50)) is None
    assert pearson(clean, constant) is None and pearson(constant, clean) is None
    assert pearson(clean, 3 * clean) == pytest.approx(1) and pearson(clean, -clean) == pytest.approx(-1)


def test_snr_is_measured_and_the_nominal_one_is_not() -> None:
    """Relative noise of 5 % at its own place has both at 26 dB; the nominal formula sees nothing but the scale."""
    clean, z = pair(200_000)
    assert nominal_snr_db(0.05) == pytest.approx(26.02, abs=0.01)
    assert snr_db(clean, clean + 0.05 * clean * (z - clean) / 0.1) == pytest.approx(26.02, abs=0.2)
    assert nominal_snr_db(0.0) is None and nominal_snr_db(1) == 0
    with pytest.raises(InvalidInput, match="noise scale must be finite and at least 0, got -1"):
        nominal_snr_db(-1)


def test_sparsity() -> None:
    """Absolute by default; relative to the rms, so that a unit of measurement doesn't matter."""
    x = torch.tensor([0.0, 1e-7, -1e-7, 1e-3, -1.0, 2.0, 3.0, 4.0])
    assert sparsity(x) == 3 / 8
    assert sparsity(x, 0.5) == 4 / 8
    assert sparsity(x, relative=0.01) == sparsity(x * 1e-5, relative=0.01) == sparsity(x * 1e5, relative=0.01) == 4 / 8
    assert sparsity(x * 1e-7) == 1
    assert sparsity(torch.zeros(4), relative=0.01) == sparsity(torch.zeros(4)) == 1
    silu = torch.nn.functional.silu(pair(100_000)[0] * 3)
    assert sparsity(silu) < 1e-4 and sparsity(silu, relative=0.1) > 0.1
    with pytest.raises(InvalidInput, match="relative must be finite"):
        sparsity(x, relative=math.nan)


def test_gradient_ratio() -> None:
    """Noisy over clean; nothing over a clean gradient of 0."""
    assert gradient_ratio(3.0, 2.0) == 1.5
    assert gradient_ratio(3.0, 0.0) is None
    with pytest.raises(InvalidInput, match="noisy_norm must be finite"):
        gradient_ratio(math.inf, 1.0)
    with pytest.raises(InvalidInput, match="clean_norm must be finite"):
        gradient_ratio(1.0, math.nan)


@pytest.mark.parametrize("measure", SLOW, ids=lambda f: f.__name__)
def test_refusals(measure) -> None:
    """Another shape, an empty tensor and numbers that are not finite are refused, and the message says whose."""
    clean, noisy = pair(4, 5)
    with pytest.raises(InvalidInput, match=r"\(4, 5\), the noisy one \(5, 4\)"):
        measure(clean, noisy.T)
    with pytest.raises(InvalidInput, match="the clean tensor is empty"):
        measure(clean[:0], noisy[:0])
    for bad in (math.nan, math.inf, -math.inf):
        broken = clean.clone()
        broken[3, 4] = bad
        with pytest.raises(InvalidInput, match="the clean tensor contains NaN or infinity"):
            measure(broken, noisy)
        with pytest.raises(InvalidInput, match="the noisy tensor contains NaN or infinity"):
            measure(noisy, broken)
        with pytest.raises(InvalidInput, match="the x tensor contains NaN or infinity"):
            sparsity(broken)
