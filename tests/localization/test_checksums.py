"""Checksums of a product: healthy ones within their variance, one wrong element in its block and row."""

from __future__ import annotations

import pytest
import torch

from noisescope.localization.host_products import BLOCK, checksums
from noisescope.localization.roundoff_floors import Shortening

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, WIDTH, OUTPUTS = 40, 96, 300  # the last block is a short one


def product(dtype: torch.dtype, *, bias: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    a, w, b = (torch.randn(*shape, generator=generator) for shape in ((ROWS, WIDTH), (OUTPUTS, WIDTH), (OUTPUTS,)))
    a, w, b = (t.to(dtype) for t in (a, w, b))
    signs = torch.randint(0, 2, (OUTPUTS,), generator=generator).double() * 2 - 1
    return a, w, b.double() if bias else None, torch.nn.functional.linear(a, w, b if bias else None), signs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_healthy_products_stay_within_their_variance(dtype, bias):
    """z has a mean square of at most 1, and no outlier."""
    z = checksums(*product(dtype, bias=bias), Shortening()).z
    assert z.shape == (ROWS, -(-OUTPUTS // BLOCK))
    assert float(z.square().mean()) < 1.2
    assert float(z.max()) < 5


@pytest.mark.parametrize("wrong", [2.0, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_shows_in_its_row_and_block(dtype, wrong):
    """And nowhere else; a NaN is beyond every limit."""
    a, w, added, y, signs = product(dtype, bias=True)
    y[7, 130] += wrong
    beyond = checksums(a, w, added, y, signs, Shortening()).z > 7
    assert beyond.nonzero().tolist() == [[7, 130 // BLOCK]]
