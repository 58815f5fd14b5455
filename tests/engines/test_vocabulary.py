"""Heads that are padded to a round number of rows."""

from __future__ import annotations

import pytest
import torch

from noisescope.engines.compare import compare_systems


def padded(engine, value):
    """Eight more rows of the head; a shift of all logits changes no probability but that of the new tokens."""
    head = engine.model.lm_head
    rows = torch.cat([head.weight.detach(), torch.zeros(8, head.weight.shape[1])])
    engine.model.lm_head = torch.nn.Linear(*reversed(rows.shape), bias=True)
    engine.model.lm_head.weight = torch.nn.Parameter(rows)
    engine.model.lm_head.bias = torch.nn.Parameter(torch.cat([torch.zeros(len(rows) - 8), torch.full((8,), value)]))
    return engine


@pytest.mark.parametrize("wide", ["a", "b"])
def test_padding_with_probability_is_a_cause(tiny, prompts, wide):
    pair = {"a": tiny(), "b": tiny()}
    pair[wide] = padded(pair[wide], 0.0)
    found = compare_systems(pair["a"], pair["b"], (prompts, prompts))
    assert found.verdict == "different" and [cause.name for cause in found.causes] == ["vocabulary"]
    assert f"{wide} gives" in found.causes[0].words and "to 8 tokens" in found.causes[0].words
    assert found.causes[0].nats.value is None and found.causes[0].token_gap.value > 0
    assert found.total.value < 1e-9


def test_padding_without_probability_is_a_note(tiny, prompts):
    found = compare_systems(tiny(), padded(tiny(), -1e4), (prompts, prompts))
    assert not found.causes and found.verdict in ("identical", "round-off")
    assert any("b's 8 more get less than 1e-06 of the probability" in note for note in found.notes)
