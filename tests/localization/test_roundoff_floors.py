"""The round-off model: spacings are exact, and healthy sums of any order stay within what it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noisescope.localization.roundoff_floors import (
    ROUNDING_STD,
    Reference,
    Shortening,
    convolution_bits,
    number_format,
    operand_bits,
    rounded_once,
    shortened,
    sum_spread,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(st.sampled_from(DTYPES), st.floats(-30000, 30000, allow_subnormal=True, width=32))
def test_an_ulp_is_the_distance_to_the_next_number(dtype, value):
    """At any number of a format, subnormal ones included, the next one away from zero is one ulp off."""
    here = torch.tensor([value], dtype=torch.float32).to(dtype)
    bits = here.abs().view({4: torch.int32, 2: torch.int16}[dtype.itemsize])
    following = (bits + 1).view(dtype)
    distance = following.double() - here.abs().double()
    assert torch.equal(number_format(dtype).ulp(here.double()), distance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_stays_within_its_limit_and_spread(dtype):
    """Rounding to nearest is off by at most half an ulp, and by 0.425 u |v| on average over binades."""
    exponents = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 8
    values = torch.exp2(exponents)
    error = (values.to(dtype).double() - values).abs()
    assert bool((error <= 1.01 * rounded_once(values, dtype)).all())  # torch rounds float64 twice on the way to 16 bits
    relative = float((error / values).square().mean().sqrt()) / number_format(dtype).u
    assert relative == pytest.approx(ROUNDING_STD, rel=0.02)


def sequential(terms: torch.Tensor) -> torch.Tensor:
    """Float32 sums over the last dimension, one term after the other."""
    total = torch.zeros(terms.shape[:-1])
    for k in range(terms.shape[-1]):
        total = total + terms[..., k]
    return total


def partial_squares(terms: torch.Tensor) -> torch.Tensor:
    sums = terms.double().cumsum(-1)
    return sums.square()[..., 7::8].mean(-1)


@pytest.mark.parametrize("kind", ["random", "massive", "one sign", "cancelling halves"])
def test_the_model_is_an_upper_limit_for_sequential_sums(kind):
    """For each kind of sum the error's rms is below the model's, though not far below."""
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn(20_000, 128, generator=generator)
    if kind == "massive":
        terms[:, 0] = 1000.0
    elif kind == "one sign":
        terms = terms.abs()
    elif kind == "cancelling halves":
        terms = terms.abs()
        terms[:, 64:] *= -1
    exact = terms.double().sum(-1)
    squares = terms.double().square().sum(-1) + partial_squares(terms)
    error = sequential(terms).double() - exact
    z = error / sum_spread(128, squares, exact, 2.0**-24)
    rms = float(z.square().mean().sqrt())
    assert 0.2 < rms < 1
    assert float(z.abs().max()) < 7


def test_rows_and_columns_of_a_reference_cut_every_part():
    """Pieces of a reference have the tolerance of the whole."""
    values = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    whole = Reference(values, (values + 1, values + 2), values + 3, values + 4, values + 5, sums=True)
    piece = whole[:, 1:3][1:2]
    assert torch.equal(piece.bound, whole.bound[1:2, 1:3])
    assert torch.equal(piece.variance, whole.variance[1:2, 1:3])
    assert piece.systematic is not None and piece.grain is not None
    assert torch.equal(piece.systematic, values[1:2, 1:3] + 4)
    assert torch.equal(piece.grain, values[1:2, 1:3] + 5)
    assert piece.sums


def test_allowed_short_operands_widen_the_floor():
    """TF32, where the user has allowed it, is no fault; it must not be on by itself."""
    assert shortened(torch.float32, "cuda") == Shortening()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert shortened(torch.float32, "cuda") == Shortening(math.sqrt(2) * 2**-11, 2**-10)
    finally:
        torch.set_float32_matmul_precision(before)
    assert shortened(torch.bfloat16, "cpu") == Shortening()  # split-K in 16 bits is a matter of CUDA


def test_convolutions_on_cuda_keep_what_cudnn_is_allowed_to(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert convolution_bits("cuda") == 11 and convolution_bits("cpu") == operand_bits()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert convolution_bits("cuda") == 24
