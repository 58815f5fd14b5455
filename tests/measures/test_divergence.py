"""Divergence: right against float64 from hundreds of nats to 1e-14, for every dtype, mask and broken row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from noisescope.errors import InvalidInput
from noisescope.measures.divergence import KL_FLOOR, kl_divergence, rounding_floor
from noisescope.testing import tiny_model

V = 50_257


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def exact(clean: Tensor, noisy: Tensor) -> Tensor:
    """The same divergence in float64, by the same identity: plain sum p log(p/q) is 1e-15 off, too much at 1e-14."""
    log_p, log_q = clean.double().log_softmax(-1), noisy.double().log_softmax(-1)
    delta = log_q - log_p
    near = delta.square() / 2 + delta**3 / 6 + delta**4 / 24
    return (log_p.exp() * torch.where(delta.abs() < 1e-3, near, torch.expm1(delta) - delta)).sum(-1)


def naive(clean: Tensor, noisy: Tensor) -> Tensor:
    log_p, log_q = clean.float().log_softmax(-1), noisy.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float(((value.double() - reference) / reference).abs().max())


@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("size", [10.0, 1.0, 0.3, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 2e-7])
def test_right_at_every_size(spread: float, size: float) -> None:
    """A real vocabulary in float32: within 2e-5 from tens of nats down to 1e-14."""
    clean = normal(2, V, spread=spread).float()
    noisy = (clean + normal(2, V, seed=1, spread=size)).float()
    assert relative_error(kl_divergence(clean, noisy), exact(clean, noisy)) < 2e-5


def test_the_plain_float32_formula_is_not() -> None:
    """At 5e-7 nats the textbook formula is over 4 % off and at 5e-9 over ten times; ours is not, on the same logits."""
    clean = normal(8, V, spread=3.0).float()
    for size, wrong in ((1e-3, 0.04), (1e-4, 10)):
        noisy = (clean + normal(8, V, seed=1, spread=size)).float()
        reference = exact(clean, noisy)
        assert relative_error(naive(clean, noisy), reference) > wrong
        assert relative_error(kl_divergence(clean, noisy), reference) < 1e-5


def test_a_common_shift_costs_few_digits() -> None:
    """All noisy logits 30 higher, so that float32 has rounded them by 1e-6: still within 1 % at 1e-9."""
    clean = normal(8, V, spread=3.0).float()
    noisy = (clean + normal(8, V, seed=1, spread=5e-5) + 30).float()
    reference = exact(clean, noisy)
    assert 5e-10 < reference.mean() < 2e-9
    assert relative_error(kl_divergence(clean, noisy), reference) < 0.01


def test_shift_alone_is_no_divergence() -> None:
    """Identical logits give exactly 0; a constant added to a row gives nothing above the floor, and never < 0."""
    clean = normal(8, 1000, spread=3.0).float()
    assert torch.equal(kl_divergence(clean, clean.clone()), torch.zeros(8))
    shifted = kl_divergence(clean, clean + torch.arange(8.0)[:, None] * 13)
    assert shifted.min() >= 0 and shifted.max() < KL_FLOOR


@pytest.mark.parametrize("jump", [-300.0, -5.0, -0.3, -0.2, 0.2, 0.3, 5.0, 6.0, 30.0, 95.0, 300.0])
def test_one_token_far_off(jump: float) -> None:
    """A single wrong logit, rare or likely, as a broken lane of the head gives it: right whatever its jump."""
    clean = normal(3, 2000, spread=5.0).float()
    clean[:, 7] = clean.amax(-1) - torch.tensor([1.0, 20.0, 90.0])  # likely, rare, gone from float32
    noisy = clean.clone()
    noisy[:, 7] += jump
    reference, value = exact(clean, noisy), kl_divergence(clean, noisy).double()
    assert torch.allclose(value, reference, rtol=2e-4, atol=1e-30)


def test_two_float32_evaluations_stay_under_the_floor() -> None:
    """A model in float32 against itself in float64 is at or below KL_FLOOR; noise of 1e-3 on its logits is above."""
    model = tiny_model("llama", layers=3)
    tokens = torch.arange(1, 41).reshape(2, 20)
    with torch.no_grad():
        single = model(tokens).logits.flatten(0, 1)
        double = model.double()(tokens).logits.flatten(0, 1)
    assert 0 < kl_divergence(double, single).max() < KL_FLOOR
    assert kl_divergence(single, single + normal(40, 64, spread=1e-3).float()).min() > KL_FLOOR


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("clean_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noisy_dtype", DTYPES, ids=str)
def test_dtypes(clean_dtype: torch.dtype, noisy_dtype: torch.dtype) -> None:
    """Any two floating types, also unlike ones: the divergence of the numbers as stored; and they are only read."""
    clean = normal(5, 999, spread=4.0).to(clean_dtype)
    noisy = (clean.double() + normal(5, 999, seed=1, spread=0.2)).to(noisy_dtype)
    before = clean.clone(), noisy.clone()
    value = kl_divergence(clean, noisy)
    assert value.dtype == torch.float32 and value.shape == (5,)
    assert relative_error(value, exact(clean, noisy)) < 5e-5
    assert torch.equal(clean, before[0]) and torch.equal(noisy, before[1])


def test_masked_tokens_add_nothing() -> None:
    """-inf on both sides is as if the token weren't there; on the clean side alone it has p = 0 and takes q's mass."""
    clean, noisy = normal(4, 300).float(), normal(4, 300, seed=1).float()
    masked = torch.tensor([0, 17, 299])
    keep = torch.ones(300, dtype=torch.bool)
    keep[masked] = False
    clean[:, masked] = -math.inf
    one_sided = kl_divergence(clean, noisy)
    p, q = clean.double().softmax(-1)[:, keep], noisy.double().softmax(-1)[:, keep]
    assert torch.allclose(one_sided.double(), (p * (p / q).log()).sum(-1), rtol=1e-5)
    noisy[:, masked] = -math.inf
    assert relative_error(kl_divergence(clean, noisy), exact(clean[:, keep], noisy[:, keep])) < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["clean", "noisy"])
def test_a_broken_row_is_nan_and_no_other(bad: float, side: str) -> None:
    """NaN or an infinity spoils its own row only. -inf in clean alone is a mask, which the test above has."""
    clean = normal(6, 50).float()
    noisy = clean + 0.1 * normal(6, 50, seed=1).float()
    reference = kl_divergence(clean, noisy)
    logits = clean if side == "clean" else noisy
    logits[2, 3] = bad
    value = kl_divergence(clean, noisy)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(value[others], reference[others])
    assert bool(value[2].isnan()) == (side == "noisy" or bad != -math.inf)


def test_rows_without_any_finite_logit_are_nan() -> None:
    """A row of -inf, or of NaN, has no distribution."""
    clean = normal(2, 9).float()
    for bad in (-math.inf, math.nan):
        assert kl_divergence(clean, torch.full((2, 9), bad)).isnan().all()
        assert kl_divergence(torch.full((2, 9), bad), clean).isnan().all()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 40), st.floats(0, 30), st.floats(-8, 1.5), st.floats(-50, 50), st.integers(0, 99)
)
def test_any_logits(rows: int, vocabulary: int, spread: float, log_size: float, shift: float, seed: int) -> None:
    """Never negative, and float64's value to 1 % or to what float32 logits of that size can carry."""
    clean = normal(rows, vocabulary, seed=seed, spread=spread).float()
    noisy = (clean + normal(rows, vocabulary, seed=seed + 100, spread=10**log_size) + shift).float()
    value, reference = kl_divergence(clean, noisy).double(), exact(clean, noisy)
    assert (value >= 0).all()
    assert ((value - reference).abs() <= 0.01 * reference + 1e-10).all()


class Largest(TorchDispatchMode):
    """The most elements any result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_blocks_change_nothing_and_bound_memory() -> None:
    """However the rows are cut, the same numbers; and no float32 copy of all logits is ever made."""
    clean, noisy = normal(64, 500).bfloat16(), normal(64, 500, seed=1).bfloat16()
    whole = kl_divergence(clean, noisy)
    for block_rows in (1, 7, 64, 1000):
        assert torch.equal(whole, kl_divergence(clean, noisy, block_rows=block_rows))
    with Largest() as seen:
        kl_divergence(clean, noisy, block_rows=4)
    assert seen.elements == 4 * 500
    large = torch.zeros(9, 2**16, dtype=torch.bfloat16)
    with Largest() as seen:
        kl_divergence(large, large)
    assert seen.elements == 2**19


def test_no_host_synchronisation() -> None:
    """On tensors without data, anything that looks at a value would fail."""
    with FakeTensorMode():
        clean, noisy = torch.empty(40, 300, dtype=torch.bfloat16), torch.empty(40, 300, dtype=torch.bfloat16)
        assert kl_divergence(clean, noisy, block_rows=16).shape == (40,)
        assert rounding_floor(clean).shape == (40,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_floor_is_what_rounding_does(dtype: torch.dtype) -> None:
    """Two roundings of nearly equal logits diverge by the floor, one rounding by half of it."""
    z = normal(100, 2000)
    floor = rounding_floor(z, dtype).double()
    ulp = torch.finfo(dtype).eps * z.abs().log2().floor().exp2()
    jittered = [(z + (normal(100, 2000, seed=s) * 2 * ulp)) for s in (1, 2)]
    # the jitter itself is taken out again, so that only the two roundings are left
    rounded = [z + (y.to(dtype).double() - y) for y in jittered]
    two, one = kl_divergence(rounded[0], rounded[1]).double(), kl_divergence(z, rounded[0]).double()
    assert float(two.mean() / floor.mean()) == pytest.approx(1, abs=0.05)
    assert float(one.mean() / floor.mean()) == pytest.approx(0.5, abs=0.03)
    assert torch.equal(rounding_floor(z.to(dtype)), rounding_floor(z.to(dtype), dtype))


def test_rounding_floor_of_masked_and_broken_rows() -> None:
    """A mask takes no part; a broken row has no floor."""
    z = normal(3, 40).float()
    masked = torch.cat([z, torch.full((3, 2), -math.inf)], dim=1)
    assert torch.allclose(rounding_floor(z, torch.bfloat16), rounding_floor(masked, torch.bfloat16))
    z[1, 1] = math.nan
    assert rounding_floor(z).isnan().tolist() == [False, True, False]


def test_no_rows() -> None:
    """Nothing in, nothing out."""
    assert kl_divergence(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)


def test_refusals() -> None:
    """Wrong shapes, types and block sizes are named."""
    z = torch.zeros(2, 3)
    with pytest.raises(InvalidInput, match=r"\(2, 3\) and \(2, 4\)"):
        kl_divergence(z, torch.zeros(2, 4))
    with pytest.raises(InvalidInput, match=r"flatten\(0, -2\)"):
        kl_divergence(z[None], z[None])
    with pytest.raises(InvalidInput, match="floating-point"):
        kl_divergence(z.long(), z.long())
    with pytest.raises(InvalidInput, match="block_rows must be at least 1, got 0"):
        kl_divergence(z, z, block_rows=0)
    with pytest.raises(InvalidInput, match="move them to the same device"):
        kl_divergence(z, z.to("meta"))
