"""Capture sees what the model computes, and changes nothing."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput, NothingInjected


def test_statistics_are_those_of_all_rows_at_once(llama, logits):
    """Streaming max, mean, mean |x| and std equal the ones computed from the concatenated tensors."""
    batches = [
        torch.randint(1, 60, (2, length), generator=torch.Generator().manual_seed(length)) for length in (5, 9, 3)
    ]
    with ns.capture(llama, operators={"linear"}, layers={1}, keep="both") as seen:
        for batch in batches:
            logits(llama, batch)
    assert len(seen.statistics) == 7
    for site, statistics in seen.statistics.items():
        rows = torch.cat([out.flatten(0, -2) for _, out in seen.raw[site]]).double()
        assert statistics.count == rows.shape[0] == 34
        assert torch.equal(statistics.maximum, rows.abs().amax(0))
        assert torch.allclose(statistics.mean, rows.mean(0)) and torch.allclose(statistics.mean_abs, rows.abs().mean(0))
        assert torch.allclose(statistics.std, rows.std(0, correction=0))


def test_capture_changes_nothing(llama, tokens, logits):
    """Operators that need no opening give bit-equal logits inside a capture."""
    clean = logits(llama, tokens)
    with ns.capture(llama, operators={"linear", "norm", "silu", "residual"}):
        assert torch.equal(clean, logits(llama, tokens))
    assert torch.equal(clean, logits(llama, tokens))


def test_raw_capture_has_inputs_and_outputs(llama, tokens, logits):
    """The output of a linear is its captured input times its weight; attention's parts fit together."""
    with ns.capture(llama, layers={0}, keep="raw", device="cpu") as seen:
        logits(llama, tokens)
    by = {(site.operator, site.module.rsplit(".", 1)[-1], site.occurrence): calls for site, calls in seen.raw.items()}
    (((x,), y),) = by["linear", "down_proj", 0]
    assert torch.equal(torch.nn.functional.linear(x, llama.model.layers[0].mlp.down_proj.weight), y)
    (((q, k), scores),) = by["matmul", "self_attn", 0]
    assert torch.equal(q @ k, scores)
    (((probabilities, v), out),) = by["matmul", "self_attn", 1]
    assert torch.equal(probabilities @ v, out)


def test_masked_tokens_do_not_count(llama, tokens, logits):
    """Padding stays out of the statistics where a mask says so."""
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    scope = ns.capture(llama, operators={"norm"}, layers={0})
    with scope as seen:
        scope.tokens(mask)
        logits(llama, tokens)
    assert {statistics.count for statistics in seen.statistics.values()} == {8}
    with pytest.raises(InvalidInput, match=r"\[batch, tokens\]"):
        scope.tokens(torch.ones(3))


def test_heads_are_the_channels_inside_attention(llama, tokens, logits):
    """Softmax statistics are per head, whatever the length."""
    with ns.capture(llama, operators={"softmax"}, layers={0}) as seen:
        logits(llama, tokens)
        logits(llama, tokens[:, :3])
    (statistics,) = seen.statistics.values()
    assert statistics.maximum.shape == (4,) and statistics.count == 2 * 36 + 2 * 9


def test_recomputation_is_captured_once(llama, tokens):
    """Gradient checkpointing runs a block twice; it is captured once."""
    llama.train()
    llama.gradient_checkpointing_enable()
    llama.config.use_cache = False
    with ns.capture(llama, operators={"linear"}, layers={0}) as seen:
        llama(tokens, labels=tokens).loss.backward()
    assert {statistics.count for statistics in seen.statistics.values()} == {12}


def test_refusals(llama, tokens, logits):
    """A wrong `keep`, and a capture that saw nothing, say so."""
    with pytest.raises(InvalidInput, match="unknown keep 'all'"):
        ns.capture(llama, keep="all")
    with pytest.raises(NothingInjected, match="nothing was captured"), ns.capture(llama, modules=["nowhere"]):
        logits(llama, tokens)
