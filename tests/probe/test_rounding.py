"""`Rounding`: one step to the next representable number, rarely, unbiased and keyed."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.probe.draws import Draw, Rows
from noisescope.testing import tiny_model

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def draw_of(samples: torch.Tensor, length: int) -> Draw:
    positions = torch.arange(length)[None].expand(len(samples), length)
    return Draw(Rows(1, samples=samples, positions=positions), 0x1234567, layout="tokens", tensor="output")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_value_moves_to_its_neighbour_or_stays(dtype: torch.dtype) -> None:
    """As integers, bits change by one; 1 value in 128 does, up as often as down, at every mantissa."""
    y = (torch.randn(4, 256, 512, dtype=torch.float64) * 10).to(dtype)
    y[0, 0, :64] = 0
    y[1, 0, :8] = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, 4.0, 1.5, -0.25])  # where the spacing changes
    moved = ns.Rounding()(y, draw_of(torch.arange(4), 256))
    bits = moved.view(INTEGERS[dtype.itemsize]).long() - y.view(INTEGERS[dtype.itemsize]).long()
    assert set(bits.unique().tolist()) == {-1, 0, 1}
    share, n = 1 / 128, y.numel()
    assert (bits != 0).sum().item() / n == pytest.approx(share, abs=5 * (share / n) ** 0.5)
    assert abs((bits > 0).sum().item() - (bits < 0).sum().item()) < 5 * (share * n) ** 0.5
    assert (moved[0, 0, :64] == 0).all()
    low = y.abs().double().log2().remainder(1) < 0.5  # the lower half of each binade moves as often as the upper
    assert (bits != 0)[low].double().mean().item() == pytest.approx(share, rel=0.2)


def test_the_same_rows_move_alike_in_any_batch() -> None:
    """Sample 3 alone, and among others."""
    y = torch.randn(4, 32, 64).bfloat16()
    together = ns.Rounding()(y, draw_of(torch.tensor([0, 7, 3, 5]), 32))
    alone = ns.Rounding()(y[2:3], draw_of(torch.tensor([3]), 32))
    assert torch.equal(together[2:3], alone) and not torch.equal(together, y)


def test_a_model_rounds_otherwise_by_each_seed(tokens: torch.Tensor) -> None:
    """The same seed gives the same bits, another seed others, and nothing is left behind."""
    model = tiny_model("llama").bfloat16()
    with torch.no_grad():
        clean = model(tokens).logits

        def rounded(seed: int) -> torch.Tensor:
            with ns.inject(model, ns.Injection(ns.Rounding(), operators={"linear"}, seed=seed)):
                return model(tokens).logits

        first, again, other = rounded(0), rounded(0), rounded(1)
        assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, clean)
        assert torch.equal(model(tokens).logits, clean)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_moves_the_same_values(dtype: torch.dtype) -> None:
    y = torch.randn(4, 64, 1536).to(dtype)
    draw = Draw(Rows(1), 0x1234567, layout="plain", tensor="output")
    assert torch.equal(ns.Rounding()(y.cuda(), draw).cpu(), ns.Rounding()(y, draw))
