"""The kernel gives the scores of the plain engine; needs an NVIDIA GPU (Triton's interpreter will do by hand)."""

from __future__ import annotations

import warnings

import pytest
import torch

from noisescope.measures import cuda_kernels, sketches
from noisescope.measures.divergence import compare, powers, token_scores

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "size"), [(300, 1e-3), (5000, 0.3), (151_936, 1e-5)])
def test_the_kernel_agrees_with_the_plain_engine(dtype: torch.dtype, width: int, size: float) -> None:
    """Small and large differences, masked tokens, broken rows, rows picked out of order."""
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(8, width, generator=draw) * 3
    noisy = clean + torch.randn(8, width, generator=draw) * size
    clean, noisy = clean.to("cuda", dtype), noisy.to("cuda", dtype)
    clean[1, 5] = noisy[1, 5] = -torch.inf
    noisy[2, 3], noisy[3, 7], clean[4, 2] = torch.nan, torch.inf, -torch.inf
    targets = torch.randint(0, width, (8,), generator=draw).cuda()
    targets[6] = -100
    order = torch.tensor([7, 0, 3, 1, 2, 6, 5, 4], device="cuda")
    assert cuda_kernels.can_compare(clean, noisy)
    found = cuda_kernels.compare(clean[order], noisy, order, targets[order])
    plain = {**token_scores(clean, noisy, targets), **powers(clean, noisy)}
    whole = [0, 5, 6, 7]  # variances of rows with infinities mean nothing
    for name, column in found.items():
        back = torch.empty_like(column)
        back[order] = column
        if name in ("signal", "error"):
            torch.testing.assert_close(back[whole], plain[name][whole], rtol=1e-3, atol=1e-12)
        else:
            torch.testing.assert_close(back, plain[name], rtol=2e-3, atol=1e-9, equal_nan=True)


def test_compare_takes_the_kernel() -> None:
    """What a sweep calls uses it, and doesn't wait for the device."""
    clean = torch.randn(4, 1000, device="cuda")
    rows, targets = torch.arange(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    compare(clean, clean, rows, targets)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a prototype
            torch.cuda.set_sync_debug_mode("error")
        found = compare(clean, clean, rows, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(found) == set(cuda_kernels.COLUMNS) and float(found["kl"].sum()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 40, 137), (2, 5, 96), (4, 300, 8960), (2, 3, 151_936)], ids=str)
def test_sketches_of_the_kernel_are_those_of_the_host(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """The same signs for any prompt number, past the end of the tape too, and for rows with gaps between them."""
    y = torch.randn(shape[0], shape[1], 2 * shape[2], generator=torch.Generator().manual_seed(0)).to(dtype)
    for first, part in ((0, slice(0, shape[2])), (4_999_999, slice(shape[2], None))):
        rows = y[..., part]
        assert cuda_kernels.can_read(rows.cuda())
        for found, expected in zip(sketches.read(y.cuda()[..., part], first), sketches.read(rows, first), strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-3)


def test_a_broken_element_breaks_its_sums_only() -> None:
    """NaN and infinity reach the group and the token they are in, as on the host."""
    y = torch.randn(1, 4, 64)
    y[0, 1, 3], y[0, 2, 40] = torch.nan, -torch.inf
    for found, expected in zip(sketches.read(y.cuda(), 0), sketches.read(y, 0), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_are_read_in_one_launch_a_dtype(dtype: torch.dtype) -> None:
    """Of any width and layout; one of another dtype or another number of tokens is read apart."""
    draw = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 5, width, generator=draw).to(dtype) for width in (1, 96, 137, 300, 8960, 1536)]
    outputs += [torch.randn(2, 5, 128, generator=draw).to(dtype)[..., 64:], torch.randn(2, 3, 48, generator=draw)]
    outputs += [torch.randn(5, 2, 64, generator=draw).to(dtype).transpose(0, 1)]
    for found, expected in zip(
        sketches.read_together([y.cuda() for y in outputs], 7), (sketches.read(y, 7) for y in outputs), strict=True
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-3)
