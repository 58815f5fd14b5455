"""Weights that differ are grouped by what explains them."""

from __future__ import annotations

import pytest
import torch

from noisescope.engines.state import Mended, find_state


def names(a, b):
    return [cause.name for cause in find_state(a, b)[0]]


def test_kinds_of_difference(tiny):
    """One tensor damaged, the head stale, tensors of another shape or name: each its own cause, or a note."""
    a, b = tiny(), tiny()
    weight = b.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[3] = 0
        b.model.lm_head.weight += 0.1 * torch.randn(b.model.lm_head.weight.shape, generator=torch.Generator())
    causes, notes = find_state(a, b)
    assert [cause.name for cause in causes] == ["damaged weight", "stale weights"] and not notes
    assert "has 1 rows of zeros (3), unlike the reference" in causes[0].words and causes[0].layers == (1,)
    assert "outside the blocks" in causes[1].words
    b.model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight[:8].detach().clone())
    b.model.register_buffer("more", torch.ones(1))
    notes = find_state(a, b)[1]
    assert any("is (64, 32) in a and (8, 32) in b: not compared" in note for note in notes)
    assert any("a lacks 1 tensors, which were not compared (more)" in note for note in notes)


def test_a_table_that_is_no_power_of_one_base_has_no_base_in_words(tiny):
    a, b = tiny(), tiny()
    b.model.model.rotary_emb.inv_freq.add_(0.5)
    (cause,) = find_state(a, b)[0]
    assert cause.words == "model.rotary_emb.inv_freq differs"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wider_side_is_the_one_that_is_written(tiny, dtype):
    """Both directions: the narrow side holds rounded numbers, which the wide side can hold."""
    for narrow, wide in ((0, 1), (1, 0)):
        pair = [tiny(), tiny()]
        pair[narrow].model.to(dtype)
        kept = [{name: x.clone() for name, x in one.tensors()} for one in pair]
        causes, _ = find_state(*pair)
        assert {cause.name for cause in causes} == {"cast"}
        mended = Mended()
        for cause in causes:
            mended.mend(pair[0], pair[1], cause)
        weights = [dict(one.tensors())["lm_head.weight"] for one in pair]
        assert torch.equal(weights[wide], weights[narrow].float())
        assert torch.equal(weights[narrow], kept[narrow]["lm_head.weight"])
        mended.restore()
        for one, before in zip(pair, kept, strict=True):
            assert all(torch.equal(x, before[name]) for name, x in one.tensors())
