"""Notes and suspects of an audit: what repeats and what does not, reported once and in true words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.faults import faulty
from noisescope.localization.audit import audit
from noisescope.localization.audit_verdict import cells_of
from noisescope.localization.call_tree import CallHash, Node
from noisescope.model.anatomy import Unit
from noisescope.sites import Site
from noisescope.testing import tiny_model


def test_a_call_hash_is_of_every_bit():
    """The hash of inputs, of the output and the sum of the weights' bits each see one bit, and nothing but bits."""
    linear, x = torch.nn.Linear(4, 3), torch.arange(8.0).reshape(2, 4)
    x[0, 0] = float("nan")
    y = torch.zeros(2, 3)

    def hash_of(args: tuple[Any, ...], output: torch.Tensor, callee: Any = linear) -> CallHash:
        unit = Unit("mlp", "module", 0, "", ("linear",))
        return CallHash.of(Node(unit, "linear", callee, 0, args, {}, output))

    first = hash_of((x, "mask", None), y)
    assert first == hash_of((x.clone(), 7), y.clone())
    assert first == hash_of((x.T.contiguous().T,), y)  # the same numbers, laid out otherwise
    other = hash_of((x,), -y)
    assert (other.given, other.weights) == (first.given, first.weights) and other.output != first.output
    x.view(torch.int32)[1, 3] ^= 1
    assert hash_of((x,), y).given != first.given
    linear.weight.data.view(torch.int32)[2, 3] ^= 1
    assert hash_of((x,), y).weights != first.weights
    assert hash_of((x[:0],), y, None).weights == ()


@pytest.mark.parametrize("restless", [True, False])
def test_inputs_that_never_come_again_are_told_of(restless):
    """Without the same inputs twice nothing is known about repeating: the verdict says so, and only then."""
    model = tiny_model("transformer_encoder")

    class Restless(type(model)):
        def forward(self, src: torch.Tensor) -> Any:
            return super().forward(src + torch.rand(()))

    if restless:
        model.__class__ = Restless
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    verdict = audit(model, {"src": x}, quick=True)
    assert verdict.verdict == "healthy"
    assert restless == any(note.startswith("no operator received the same inputs twice") for note in verdict.notes)


def test_weights_that_change_between_forwards_are_told_of():
    """One bit of one weight: the linear computes rightly with both, so no operator is blamed."""
    model = tiny_model("llama", layers=2)
    calls = []

    class Flipping(type(model.model.layers[1])):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            if len(calls) == 3:
                self.mlp.up_proj.weight.data.view(torch.int32)[0, 0] ^= 1
            return super().forward(*args, **kwargs)

    model.model.layers[1].__class__ = Flipping
    verdict = audit(model, quick=True)
    assert verdict.verdict == "undecided" and not verdict.suspects
    assert [str(site) for site in verdict.unseen] == ["weight of linear at block 1 (model.layers.1.mlp.up_proj)"]
    assert any("its weights changed between two forwards" in note for note in verdict.notes)


def test_what_differs_within_round_off_is_told_of():
    """An ulp on another element each time, as sums in no fixed order have it: no alarm, but a note with its number."""
    model, calls = tiny_model("llama", layers=2), []

    def nudge(y: torch.Tensor, draw: Any) -> torch.Tensor:
        calls.append(y)
        y = y.clone()
        y[0, 0, len(calls)] = torch.nextafter(y[0, 0, len(calls)], torch.tensor(9.0))
        return y

    with ns.inject(model, ns.Injection(nudge, modules=("model.layers.1.mlp.up_proj",), phases={"forward"})):
        verdict = audit(model, quick=True)
    assert verdict.verdict == "healthy"
    assert "1 operators differ from run to run, within the round-off floor" in verdict.notes


def test_a_wrong_cache_is_one_suspect(monkeypatch):
    """It spoils keys and values of one call: one suspect, whose evidence names both."""
    from transformers import DynamicCache

    right = DynamicCache.update

    def update(self: Any, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = right(self, keys, values, layer, *args, **kwargs)
        return (keys * 1.01, values * 1.01) if layer == 1 else (keys, values)

    monkeypatch.setattr(DynamicCache, "update", update)
    verdict = audit(tiny_model("llama", layers=4), torch.arange(3, 19).reshape(2, 8), tokens=8, batch=2, decode=0)
    (suspect,) = verdict.suspects
    assert str(suspect.site) == "input of attention at block 1 (model.layers.1.self_attn)"
    assert suspect.fault_class == "gain"
    assert "expected: keys of model.layers.1.self_attn as LlamaAttention computes it" in suspect.evidence
    assert "also wrong: values of model.layers.1.self_attn as LlamaAttention computes it" in suspect.evidence


def test_a_cache_of_ones_own_is_code_like_any_other():
    """What its class says is what the model is meant to do."""
    from transformers import DynamicCache

    class Louder(DynamicCache):
        def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            keys, values = super().update(keys, values, layer, *args, **kwargs)
            return keys * 1.01, values

    inputs = {"input_ids": torch.arange(3, 19).reshape(2, 8), "past_key_values": Louder()}
    assert audit(tiny_model("llama", layers=2), inputs, quick=True).verdict == "healthy"


@pytest.mark.parametrize("method", ["audit", "scans"])
def test_errors_where_nothing_may_differ_are_told_by_their_size(method):
    """A gain of 1 % is 1 % of the largest element, and no mean or ulp of numbers near 0 is reported."""
    model = tiny_model("llama", layers=4)
    with faulty(model, "gain:0.01@1"):
        options = {"quick": True} if method == "audit" else {}
        evidence = ns.locate(model, method=method, **options).suspects[0].evidence
    assert "2048 of 2048 elements differ (exact equality required), by up to" in evidence
    assert "mean" not in evidence
    ulps = float(evidence.split("(")[2].split(" ulp of the largest element)")[0])
    assert 0.01 * 2**23 * 0.9 < ulps < 0.01 * 2**24 * 1.1


def test_detection_limits_are_of_healthy_sites():
    """What a faulty softmax and the attention around it computed says nothing of what would have shown."""
    model = tiny_model("llama", layers=3)
    healthy = audit(model, quick=True).smallest_visible
    with faulty(model, "gain:0.01@1/softmax"):
        found = audit(model, quick=True)
    assert found.verdict == "faulty" and found.suspects[0].site.place == 1
    assert healthy["softmax"]["sites"] == 3 and found.smallest_visible["softmax"]["sites"] == 2
    assert found.smallest_visible["linear"]["sites"] == healthy["linear"]["sites"]
    for operator, limit in found.smallest_visible.items():
        assert limit["gain"] <= 1.5 * healthy[operator]["gain"], operator


def test_cells_have_one_order():
    """Places as data flow, operators by name: not as a set of strings is ordered, which differs between processes."""
    names = ("softmax", "linear", "norm", "silu", "attention", "matmul", "residual", "embedding")
    sites = [Site(name, place, "m") for place in ("lm_head", 1, 0, "embed") for name in names]
    log: Any = SimpleNamespace(judged=SimpleNamespace(calls={(site, 0): True for site in sites}))
    found = [(cell.place, cell.operator) for cell in cells_of(log)]
    assert found == [(place, name) for place in ("embed", 0, 1, "lm_head") for name in sorted(names)]
