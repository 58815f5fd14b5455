"""Block by block, curvature is what one double backward through the whole model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.probe.test_recomputation import PeakMemory
from torch import Tensor

from noisescope.measures.block_curvature import block_hessian_traces
from noisescope.measures.curvature import hessian_traces
from noisescope.model.anatomy import dissect
from noisescope.testing import tiny_model

TOKENS = torch.randint(1, 60, (6, 16), generator=torch.Generator().manual_seed(3))


def loss(model: Any) -> Tensor:
    found: Tensor = model(TOKENS, labels=TOKENS, use_cache=False).loss
    return found


def groups_of(model: Any) -> dict[str, list[torch.nn.Parameter]]:
    blocks = [model.get_submodule(name) for name in dissect(model).blocks]
    return {str(at): [p for p in block.parameters() if p.dim() >= 2] for at, block in enumerate(blocks)}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "falcon", "opt"])
def test_traces_are_those_of_the_whole_model(name: str) -> None:
    """The same probes, so the same estimates up to rounding, for every block."""
    model = tiny_model(name, layers=3)
    groups, before = groups_of(model), [p.requires_grad for p in model.parameters()]
    whole = hessian_traces(model, loss, groups, probes=3, seed=5)
    found = block_hessian_traces(model, dissect(model), loss, groups, probes=3, seed=5)
    assert found is not None and found.keys() == whole.keys()
    largest = max(abs(one.trace) for one in whole.values())
    for layer, one in whole.items():
        assert found[layer].trace == pytest.approx(one.trace, rel=1e-3, abs=1e-4 * largest)
        assert found[layer].low == pytest.approx(one.low, rel=1e-2, abs=1e-3 * largest)
        assert (found[layer].parameters, found[layer].probes) == (one.parameters, one.probes)
    assert [p.requires_grad for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())


def test_what_is_no_chain_is_left_to_the_whole_model() -> None:
    """Groups out of order, and a model whose blocks are not one after the other."""
    model = tiny_model("llama", layers=3)
    groups = groups_of(model)
    backwards = dict(reversed(list(groups.items())))
    assert block_hessian_traces(model, dissect(model), loss, backwards, probes=2, seed=0) is None
    t5 = tiny_model("t5")
    ids = TOKENS[:, :8].contiguous()
    found = block_hessian_traces(
        t5, dissect(t5), lambda m: m(input_ids=ids, labels=ids).loss, groups_of(t5), probes=2, seed=0
    )
    assert found is None


def test_a_block_that_reads_of_another_is_seen() -> None:
    """Block 2 adds what the first one's MLP gave: a path around the chain."""
    model, given = tiny_model("llama", layers=3), []
    first, last = model.model.layers[0].mlp, model.model.layers[2].mlp
    own, other = first.forward, last.forward
    first.forward = lambda x: given.append(own(x)) or given[-1]
    last.forward = lambda x: other(x) + 10 * given[-1]
    assert block_hessian_traces(model, dissect(model), loss, groups_of(model), probes=2, seed=0) is None


def test_a_block_adds_three_hidden_states() -> None:
    peaks = {}
    for layers in (3, 7):
        model = tiny_model("llama", layers=layers)
        with PeakMemory(model) as memory:
            block_hessian_traces(model, dissect(model), loss, groups_of(model), probes=2, seed=0)
        peaks[layers] = memory.peak
    assert (peaks[7] - peaks[3]) / 4 < 4 * TOKENS.numel() * 32 * 4
