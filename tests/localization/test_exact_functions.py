"""Which functions give the same bits everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.localization.exact_functions import is_exact


@pytest.mark.parametrize(
    "function",
    [
        torch.add,
        Tensor.__add__,
        Tensor.transpose,
        torch.cat,
        torch.where,
        Tensor.masked_fill,
        F.pad,
        torch.topk,
        torch.sqrt,
        Tensor.shape.__get__,
    ],
    ids=lambda f: f.__name__,
)
def test_functions_that_are_exact(function):
    assert is_exact(function, ())


@pytest.mark.parametrize(
    "function",
    [
        torch.exp,
        torch.sum,
        Tensor.mean,
        torch.matmul,
        F.linear,
        F.softmax,
        F.silu,
        torch.rsqrt,
        torch.cos,
        torch.pow,
        torch.cumsum,
        F.layer_norm,
        F.scaled_dot_product_attention,
        torch.var,
        torch.addcmul,
        F.conv1d,
        torch.einsum,
        torch.sigmoid,
        lambda x: x,
    ],
    ids=lambda f: f.__name__,
)
def test_functions_that_are_not(function):
    """Sums, products, approximations, and whatever is not known."""
    assert not is_exact(function, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_functions_depend_on_no_layout(dtype):
    """The same numbers laid out otherwise, or in a part of a larger tensor, give the same bits."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 48, generator=draw).to(dtype) for _ in range(2))
    wide = torch.zeros(64, 99, dtype=dtype)
    wide[:, 7:55] = x
    for function in (torch.add, torch.mul, torch.div, torch.sub, torch.maximum):
        assert torch.equal(function(x, y), function(x.T.contiguous().T, y))
        assert torch.equal(function(x, y), function(wide[:, 7:55], y))
    assert torch.equal(x.abs().sqrt(), wide[:, 7:55].abs().sqrt())


def test_products_of_complex_numbers_are_not_exact():
    z = torch.ones(2, dtype=torch.complex64)
    assert not is_exact(torch.mul, (z, z)) and is_exact(torch.mul, (z.real, z.real)) and is_exact(torch.cat, ([z],))
