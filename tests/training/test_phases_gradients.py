"""What noise does to gradients, before a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noisescope.errors import InvalidInput
from noisescope.training import gradient_pretest


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch, labels=batch).loss
    return found


def test_each_phase_moves_the_gradient(llama: Any) -> None:
    """Forward and backward noise both change it, both together more than either, and .grad is untouched."""
    batches = list(torch.arange(36).reshape(3, 2, 6) + 1)
    found = gradient_pretest(llama, loss, batches, noise_scale=0.1)
    change = {way: row["change"]["value"] for way, row in found.items()}
    assert 0 < change["backward"] < change["both"] and 0 < change["forward"] < change["both"]
    assert all(row["ratio"]["n"] == 3 and row["band"] for row in found.values())
    assert all(parameter.grad is None for parameter in llama.parameters())
    assert found == gradient_pretest(llama, loss, batches, noise_scale=0.1)


def test_smaller_noise_moves_it_less(llama: Any, tokens: torch.Tensor) -> None:
    """The relative change is about proportional to the scale."""
    large, small = (gradient_pretest(llama, loss, [tokens] * 3, noise_scale=s)["both"] for s in (0.05, 0.005))
    assert large["change"]["value"] == pytest.approx(10 * small["change"]["value"], rel=0.5)
    with pytest.raises(InvalidInput, match="at least one batch"):
        gradient_pretest(llama, loss, [])
