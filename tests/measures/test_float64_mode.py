"""Float64Mode: a float32 model's own code in float64, with nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from noisescope.measures.float64_mode import Float64Mode
from noisescope.testing import tiny_model


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "falcon"])
def test_a_model_computes_as_its_copy_in_float64_and_stays_as_it_was(name: str) -> None:
    model = tiny_model(name, layers=2)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    ids = torch.arange(3, 23)[None]
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        single = model(ids, use_cache=False).logits
        with Float64Mode():
            found = model(ids, use_cache=False).logits
        assert torch.equal(model(ids, use_cache=False).logits, single)
        expected = wide(ids, use_cache=False).logits
    assert found.dtype == torch.float64 and not torch.equal(found, single.double())
    # The copy still rounds to float32 inside its norms; the mode does not.
    assert (found - expected).norm() < (found - single).norm()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_casts_to_float32_round_nothing() -> None:
    x = torch.linspace(-3, 5, 1000)

    def code(x: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(x * 1.1, dim=-1, dtype=torch.float32)
        return (scores.float() + x.to(torch.float32).square().mean()).type(torch.float32)

    with Float64Mode():
        found = code(x)
    wide = x.double()
    torch.testing.assert_close(found, (wide * 1.1).softmax(-1) + wide.square().mean(), rtol=1e-15, atol=0)
    assert code(x).dtype == torch.float32


def test_other_dtypes_and_tensors_that_are_written_into_are_left_alone() -> None:
    x, half, mask = torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.zeros(3)
    with Float64Mode():
        mask[1] = x[0]
        mask += x
        mask.mul_(x * 2)
        summed = half + half
    assert mask.tolist() == [2, 4, 2] and mask.dtype == torch.float32 and summed.dtype == torch.bfloat16


def test_angles_of_rotary_embeddings_stay_as_every_engine_has_them() -> None:
    """At long positions they are coarse in float32, alike for all."""
    frequencies, positions = torch.rand(1, 8, 1), torch.arange(30000, 30010)[None, None].float()

    def table() -> torch.Tensor:
        return (frequencies.float() @ positions.float()).cos()

    with Float64Mode():
        found = table()
    assert torch.equal(found, table().double())
