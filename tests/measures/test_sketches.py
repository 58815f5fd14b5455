"""Sketches: a pure function of seed, prompt, token and channel, and honest about the size of a difference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noisescope.measures import sketches

PROMPTS, TOKENS, WIDTH = 32, 32, 96


def test_signs_never_change():
    """The first signs of seed 0 in version 3: a record made today is read by every later release."""
    assert (sketches.VERSION, sketches.SHORT, sketches.LONG) == (3, 13, 29)
    first = "".join("+" if sign > 0 else "-" for sign in sketches.signs(0)[:32].tolist())
    assert first == "-+--++-+----+-++++----+--++--+--"
    assert not torch.equal(sketches.signs(0), sketches.signs(1))
    assert abs(float(sketches.signs(0).double().mean())) < 0.005


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 40), st.sampled_from([1, 7, 26, 58, 96, 137, 160]), st.integers(0, 2**20))
def test_the_sketch_of_a_difference_is_the_difference_of_sketches(batch, tokens, width, first):
    """For any shape and any prompt number, and each prompt by itself as in a batch."""
    generator = torch.Generator().manual_seed(first)
    a, b = torch.randn(2, batch, tokens, width, generator=generator, dtype=torch.float64)
    found = sketches.sketch(a, first) - sketches.sketch(b, first)
    assert torch.allclose(found, sketches.sketch(a - b, first), atol=1e-9)
    alone = [sketches.sketch(a[row : row + 1], first + row) for row in range(batch)]
    assert torch.allclose(torch.cat(alone), sketches.sketch(a, first), atol=1e-12)
    assert found.shape == (batch, sketches.numbers_of(tokens))


def pattern(name: str) -> torch.Tensor:
    """A difference that sits where differences sit in practice, [P, T, C]."""
    generator = torch.Generator().manual_seed(7)
    dense = torch.randn(PROMPTS, TOKENS, WIDTH, generator=generator)
    mask = torch.zeros_like(dense)
    if name == "one channel":
        mask[:, :, 5] = 1
    elif name == "two channels at the first token":
        mask[:, 0, [12, 61]] = 1
    elif name == "first token":
        mask[:, 0] = 1
    elif name == "constant":
        return torch.ones_like(dense)
    elif name == "same in every token and prompt":
        return dense[:1, :1].expand_as(dense).contiguous()
    else:
        mask += 1
    return dense * mask


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "one channel",
        "two channels at the first token",
        "first token",
        "constant",
        "same in every token and prompt",
    ],
)
def test_norms_are_told_within_ten_percent(name):
    """Also where all of the difference is in one channel, in one token, or alike everywhere."""
    difference = pattern(name)
    told = float(sketches.sketch(difference).norm() / difference.norm())
    assert abs(told - 1) < 0.1


def test_a_single_element_is_kept_whole():
    """A spike has no sampling error at all."""
    spike = torch.zeros(1, TOKENS, WIDTH)
    spike[0, 3, 17] = -5.0
    assert float(sketches.sketch(spike).norm()) == 5.0


def test_order_and_sign_count():
    """Swapped channels, swapped tokens and a flipped sign all show, each at its true size."""
    y = torch.randn(PROMPTS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    for other in (y.roll(1, -1), y.roll(1, 1), -y):
        told = (sketches.sketch(y) - sketches.sketch(other)).norm()
        assert float(told) == pytest.approx(float((y - other).norm()), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_lose_nothing(dtype):
    """The sketch of a 16-bit tensor is that of the same numbers in float32."""
    y = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(sketches.sketch(y), sketches.sketch(y.float()))
    assert sketches.sketch(y).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sizes_are_exact(dtype):
    """Each token's is summed in float32: neither 16 bits nor the range of float16 are felt."""
    y = (1000 * torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert torch.allclose(sketches.read(y, 0)[1].double(), y.double().norm(dim=-1), rtol=1e-6)


@pytest.mark.parametrize("width", [96, 576, 1536, 3072, 4096])
def test_what_is_alike_in_all_tokens_is_not_told_larger(width):
    """A constant, and one vector in every token, at the widths of real models: elements of a bucket share no sign."""
    generator = torch.Generator().manual_seed(0)
    for y in (torch.ones(16, 48, width), torch.randn(1, 1, width, generator=generator).expand(16, 48, width)):
        found = sketches.sketch(y.contiguous()).double().square().sum().sqrt()
        assert float(found / y.double().square().sum().sqrt()) == pytest.approx(1.0, abs=4 / (2 * 16 * 13) ** 0.5)
