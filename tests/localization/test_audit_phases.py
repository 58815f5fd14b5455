"""Faults that show in one phase or shape alone: the audit runs there, and says where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from noisescope.localization.audit import audit
from noisescope.testing import tiny_model

MODULE = "model.layers.1.mlp.up_proj"


def with_fault(change: Callable[[Tensor], Tensor]) -> Any:
    model = tiny_model("llama")
    linear = model.get_submodule(MODULE)
    linear.forward = lambda x: change(type(linear).forward(linear, x))
    return model


def part(y: Tensor, rows: Any) -> Tensor:
    y = y.clone()
    y[rows] *= 1.05
    return y


def only_decode(y: Tensor) -> Tensor:
    return 1.05 * y if y.shape[1] == 1 else y


def tail_of_long(y: Tensor) -> Tensor:
    return part(y, (slice(None), slice(48, None)))


def large_batch(y: Tensor) -> Tensor:
    return part(y, slice(3, None))


@pytest.mark.parametrize(
    ("change", "kind", "phase", "rows"),
    [
        (only_decode, "gain", "decode", ""),
        (tail_of_long, "tail", "prefill 1 x 60 tokens", "tokens 48 to 59, of 60 tokens"),
        (large_batch, "batch", "8 x", "sequences 3 to 7 of 8, all tokens"),
    ],
)
def test_a_fault_of_one_phase_is_found_there(change, kind, phase, rows):
    """And the base batch alone, 2 x 32 tokens, would not have shown it."""
    model = with_fault(change)
    assert audit(model, quick=True).verdict == "healthy"
    (suspect,) = audit(model).suspects
    assert (suspect.site.module, suspect.site.tensor, suspect.fault_class) == (MODULE, "output", kind)
    assert f"in {phase}" in suspect.evidence or phase in suspect.evidence.rpartition("; in ")[2]
    assert suspect.row_words == rows


def test_rows_of_a_fault_in_one_token():
    """By sequence and token, so that the caller finds it again."""
    model = with_fault(lambda y: part(y, (1, 5)) if y.shape[:2] == (2, 32) else y)
    (suspect,) = audit(model, quick=True).suspects
    assert suspect.rows == ((1, 5),) and suspect.row_words == "token 5 of sequence 1, of 32 tokens"


def test_a_fault_with_left_padding_alone():
    """Code between operators that goes wrong where the first token is padding."""
    model = tiny_model("llama")
    block = model.model.layers[1]

    def forward(x: Tensor, *args: Any, right: Any = block.forward, **others: Any) -> Any:
        y = right(x, *args, **others)
        mask = others.get("attention_mask")
        padded = mask is not None and not bool(mask[-1, 0, -1, 0])  # the last query does not see the first key
        return 1.05 * y if padded else y

    block.forward = forward
    assert audit(model, quick=True).verdict == "healthy"
    (suspect,) = audit(model).suspects
    assert (suspect.site.place, suspect.site.module, suspect.fault_class) == (1, "model.layers.1", "gain")
    assert "left padding" in suspect.evidence


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_first_slot_of_a_new_block_of_a_paged_cache(monkeypatch, block):
    """Decode fills one block of each usual size and begins the next."""
    right = DynamicLayer.update

    def update(self: DynamicLayer, keys: Tensor, values: Tensor, *args: Any, **others: Any) -> Any:
        cached, rest = right(self, keys, values, *args, **others)
        if keys.shape[-2] == 1 and cached.shape[-2] % block == 1 and cached.shape[-2] > 1:
            cached = cached.clone()
            cached[..., -1, :] = 0
        return cached, rest

    monkeypatch.setattr(DynamicLayer, "update", update)
    first = audit(tiny_model("llama", layers=2, max_position_embeddings=512)).suspects[0]
    assert (first.site.module, first.site.tensor) == ("model.layers.0.self_attn", "input")
    assert "in decode" in first.evidence


def test_one_shape_that_is_asked_for():
    """`tokens`, `batch` and `decode` choose it; the base batches are run all the same."""
    model = with_fault(large_batch)
    for batch, verdict in ((1, "healthy"), (5, "faulty")):
        found = audit(model, tokens=6, batch=batch, decode=0)
        assert found.verdict == verdict
        assert [str(phase) for phase in found.coverage.phases][-1] == f"prefill {batch} x 6 tokens"
    found = audit(tiny_model("llama"), tokens=6, batch=1, decode=3)
    assert [str(phase) for phase in found.coverage.phases][-2:] == [
        "prefill 1 x 6 tokens",
        "decode 1 x 3 tokens after 6",
    ]
    assert found.forwards == 9 + 1 + 3


def test_a_budget_ends_after_the_base_batches():
    """What was not run is named, and the verdict holds for what was."""
    found = audit(tiny_model("llama"), budget=1e-9)
    assert (found.verdict, found.forwards) == ("healthy", 9)
    assert [str(phase) for phase in found.coverage.phases] == ["prefill 2 x 32 tokens, 9 forwards"]
    assert len(found.coverage.not_run) >= 6
    assert all("the budget of 1e-09 s was spent" in each or "positions" in each for each in found.coverage.not_run)


def test_a_fault_that_comes_and_goes_needs_repeats():
    """Every sixth call of a module: three forwards of one batch miss it, six more do not."""
    model, calls = tiny_model("llama"), []
    linear = model.get_submodule(MODULE)

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        y = nn.Linear.forward(linear, x)
        return 1.05 * y if len(calls) % 6 == 0 else y

    linear.forward = forward
    assert audit(model, quick=True).verdict == "healthy"  # four calls
    calls.clear()
    found = audit(model, quick=True, repeat=6)
    assert found.forwards == 10
    (suspect,) = found.suspects
    assert suspect.site.module == MODULE and not suspect.details["repeatable"]


def test_a_workload_that_the_model_can_not_run_is_named():
    """Unless the caller asked for it."""
    model = tiny_model("llama")

    class Narrow(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            if len(input_ids) > 2:
                raise ValueError("at most two sequences")
            return super().forward(input_ids, **others)

    model.__class__ = Narrow
    found = audit(model)
    assert found.verdict == "healthy"
    assert sum("ValueError: at most two sequences" in each for each in found.coverage.not_run) == 2
    with pytest.raises(ValueError, match="at most two"):
        audit(model, batch=3)


def test_a_workload_that_ends_in_the_middle_says_how_far_it_came():
    """Its prefill ran, its decode steps did not."""
    model = tiny_model("llama")

    class NoDecode(type(model)):  # type: ignore[misc]
        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Any = None,
            past_key_values: Any = None,
            use_cache: Any = None,
        ) -> Any:
            if past_key_values is not None:
                raise NotImplementedError("no decode")
            return super().forward(input_ids, attention_mask, use_cache=use_cache)

    model.__class__ = NoDecode
    found = audit(model)
    assert found.verdict == "healthy"
    assert not [phase for phase in found.coverage.phases if phase.kind == "decode"]
    assert [phase for phase in found.coverage.phases if phase.padding == "left"]
    assert any("no decode" in each for each in found.coverage.not_run)


def test_each_decode_step_is_judged():
    """A fault in the third step alone."""
    model, lengths = tiny_model("llama"), []

    def forward(x: Tensor) -> Tensor:
        y = nn.Linear.forward(linear, x)
        lengths.append(x.shape[1])
        return 1.05 * y if lengths[-3:] == [1, 1, 1] else y

    linear = model.get_submodule(MODULE)
    linear.forward = forward
    assert audit(model, tokens=5, batch=1, decode=2).verdict == "healthy"
    lengths.clear()
    (suspect,) = audit(model, tokens=5, batch=1, decode=3).suspects
    assert suspect.site.module == MODULE and "in decode 1 x 3 tokens after 5" in suspect.evidence
    assert torch.tensor(lengths[-3:]).eq(1).all()
