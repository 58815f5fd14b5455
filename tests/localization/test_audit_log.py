"""NaN and infinity are traced to where they arise: a fault is a suspect, an overflow of the dtype is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noisescope as ns
from noisescope.localization.audit import audit
from noisescope.localization.audit_log import AuditLog
from noisescope.localization.call_tree import Node, hashed
from noisescope.localization.data_flow import About, NonFiniteOrigin
from noisescope.localization.error_pattern import Pattern
from noisescope.localization.host_operators import recompute
from noisescope.localization.verdict import Verdict
from noisescope.model.anatomy import Unit, dissect
from noisescope.sites import Site
from noisescope.testing import tiny_model

NAN, INF = float("nan"), float("inf")


def arising(verdict: Verdict) -> list[str]:
    return [note for note in verdict.notes if note.startswith("NaN or infinity first appears")]


def spoilt(module: str, where: Any, value: float) -> ns.Injection:
    def perturb(y: torch.Tensor, draw: Any) -> torch.Tensor:
        y = y.clone()
        y[where] = value
        return y

    return ns.Injection(perturb, modules=(module,), phases={"forward"})


ALL, CHANNEL, ELEMENT = ..., (..., 5), (0, 0, 0)


SPOILT = [
    ("audit", "model.embed_tokens", "embedding", "embed", ELEMENT, NAN),
    ("auto", "model.layers.1.mlp.up_proj", "linear", 1, CHANNEL, NAN),
    ("audit", "model.layers.1.self_attn.q_proj", "linear", 1, ALL, INF),
    ("audit", "model.layers.2.input_layernorm", "norm", 2, ELEMENT, -INF),
    ("auto", "model.layers.0", "residual", 0, ALL, NAN),
    ("audit", "model.layers.1", "residual", 1, ELEMENT, INF),
    ("audit", "lm_head", "linear", "lm_head", ALL, NAN),
]


@pytest.mark.parametrize(("method", "module", "operator", "place", "where", "value"), SPOILT)
def test_a_fault_is_named_where_it_makes_them(method, module, operator, place, where, value):
    """One element, a channel or everything: what comes after was given NaN, and is not blamed."""
    model = tiny_model("llama", layers=3).bfloat16()
    with ns.inject(model, spoilt(module, where, value)):
        verdict = ns.locate(model, method=method, quick=True)
    assert verdict.verdict == "faulty"
    assert [(s.site.place, s.site.operator, s.site.module) for s in verdict.suspects] == [(place, operator, module)]
    (note,) = arising(verdict)
    assert f"{operator} at" in note and f"({module})" in note
    assert "NaN or infinit" in verdict.suspects[0].evidence
    assert verdict.suspects[0].fault_class in ("unknown", "dead lane")


def test_healthy_numbers_arise_nowhere():
    """Nothing is reported where all is finite, with a mask of -inf as well."""
    model = tiny_model("llama", attn_implementation="eager")
    mask = torch.zeros(2, 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -INF)
    verdict = audit(model, {"input_ids": torch.arange(3, 19).reshape(2, 8), "attention_mask": mask}, quick=True)
    assert (verdict.verdict, arising(verdict)) == ("healthy", [])


def scaled(factor: float, *modules: str) -> nn.Module:
    """A float16 model with some weights of block 1 made larger."""
    model = tiny_model("llama", layers=3).half()
    with torch.no_grad():
        for module in modules:
            model.get_submodule(f"model.layers.1.{module}").weight.mul_(factor)
    return model


def with_large_numbers(module: str) -> nn.Module:
    """GPT-2 in float16, where the stream holds 60000 and so does the bias of one linear in block 0: both are finite."""
    model = tiny_model("gpt2").half()
    with torch.no_grad():
        model.transformer.wte.weight[:, 3] = 6e4
        model.get_submodule(f"transformer.h.0.{module}").bias[3] = 6e4
    return model


OVERFLOWS = [
    (lambda: scaled(3e5, "mlp.up_proj"), "at linear at block 1 (model.layers.1.mlp.up_proj)"),
    (
        lambda: scaled(5e3, "mlp.up_proj", "mlp.gate_proj"),
        "at input of linear at block 1 (model.layers.1.mlp.down_proj)",
    ),
    (lambda: with_large_numbers("attn.c_proj"), "at input of norm at block 0 (transformer.h.0.ln_2)"),
    (lambda: with_large_numbers("mlp.c_proj"), "at residual at block 0 (transformer.h.0)"),
]


@pytest.mark.parametrize(("make", "where"), OVERFLOWS, ids=["product", "gate x up", "sum inside", "sum"])
def test_an_overflow_of_the_dtype_is_no_fault(make, where):
    """The host's own number lies beyond float16, in an operator or between two: reported, and nobody is a suspect."""
    verdict = audit(make(), quick=True)
    assert verdict.verdict == "undecided" and not verdict.suspects  # nothing is known of what was given NaN
    (note,) = arising(verdict)
    assert where in note and "an overflow of float16 (largest value 65504), not a fault" in note


def test_auto_tells_of_the_overflow_as_well():
    """Relations can't judge NaN either: the audit's note says why."""
    verdict = ns.locate(scaled(3e5, "mlp.up_proj"), quick=True)
    assert verdict.verdict == "undecided"
    assert "overflow of float16" in arising(verdict)[0]


def test_weights_that_are_not_finite_are_told_of():
    """The host reads the same weights: no fault of the device, and no overflow."""
    model = tiny_model("llama", layers=3)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = NAN
    verdict = audit(model, quick=True)
    assert verdict.verdict == "undecided" and not verdict.suspects
    (note,) = arising(verdict)
    assert "(model.layers.2.mlp.down_proj): the host's result from the same inputs is not finite either" in note


def call(module: str, x: torch.Tensor, y: torch.Tensor, operator: str = "linear") -> Node:
    return Node(Unit(module, "module", 0, "", (operator,)), operator, nn.Linear(2, 2), 0, (x,), {}, y)


def test_the_first_of_a_forward_counts():
    """Later ones in the same forward, and those of later forwards, are not asked for."""
    nonfinite, fine, bad = NonFiniteOrigin(), torch.ones(3), torch.tensor([1.0, NAN])
    nonfinite.see(call("a", fine, fine))
    assert nonfinite.origin is None
    nonfinite.see(call("a", bad, bad))
    assert nonfinite.origin is not None
    assert nonfinite.origin.site == Site("linear", 0, "a", tensor="input")
    for _ in range(2):
        nonfinite.see(call("b", fine, bad))
        nonfinite.next_pass()
    assert nonfinite.origin.site.module == "a"


def test_masks_are_not_where_infinity_comes_from():
    """Attention is given -inf by design: only queries, keys and values count."""
    nonfinite, fine, bad = NonFiniteOrigin(), torch.ones(2, 3), torch.full((2, 3), -INF)
    unit = Unit("attn", "attention", 1, "attention", ("matmul",))
    nonfinite.see(Node(unit, "attention", F.scaled_dot_product_attention, 0, (fine, fine, fine, bad), {}, fine * NAN))
    assert nonfinite.origin is not None and nonfinite.origin.site.tensor == "output"


def test_a_hint_counts_where_the_numbers_say_less():
    """What the data flow knows of a class is taken over an unknown pattern, not over a clear one."""
    site = Site("linear", 0, "model.layers.0.mlp.up_proj")
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 8, 16, generator=draw), torch.randn(24, 16, generator=draw)
    about = About("keys of attn as Attention computes it", Pattern("position", 0.8, "angles of another position"))
    found = []
    for y in (torch.randn(2, 8, 24, generator=draw), F.linear(x, w) * 1.5):
        log = AuditLog(dissect(tiny_model("llama", layers=2)), rows=64, seed=0)
        log.begin(0)
        log._judge(site, recompute("linear", F.linear, (x, w), {}, y, log.rows), 1, about=about)
        found.append(log.alarms[site].pattern)
    assert (found[0].fault_class, found[0].confidence) == ("position", 0.8)
    assert found[0].text == "angles of another position"
    assert found[0].details["made_as"] == "keys of attn as Attention computes it"
    assert found[1].fault_class == "gain"


def test_a_hook_that_makes_nan_is_a_fault_and_not_an_overflow():
    """The module's own output is finite, and its parent's is not: the note says the same as the suspect."""

    def spoil(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[0, 3, 2] = NAN
        return y

    model = tiny_model("llama", layers=3)
    model.model.layers[1].mlp.register_forward_hook(spoil)
    verdict = audit(model, quick=True)
    assert [str(s.site) for s in verdict.suspects] == ["residual at block 1 (model.layers.1)"]
    assert verdict.suspects[0].rows == ((0, 3),)
    (note,) = arising(verdict)
    assert "at residual at block 1 (model.layers.1): a fault: from the same inputs" in note


@pytest.mark.parametrize("module", ["mlp", "self_attn"])
def test_nan_that_a_patched_forward_makes_is_a_fault(module):
    """A module's output is altered behind the operator that gave it: the origin's words and the suspect agree."""
    model = tiny_model("llama", layers=3)
    patched = model.get_submodule(f"model.layers.1.{module}")
    right = patched.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        y = right(*args, **kwargs)
        (y[0] if isinstance(y, tuple) else y)[0, 3, 2] = NAN
        return y

    patched.forward = forward
    verdict = audit(model, quick=True)
    assert [(s.site.place, s.site.module) for s in verdict.suspects] == [(1, f"model.layers.1.{module}")]
    (note,) = arising(verdict)
    assert f"(model.layers.1.{module}): a fault:" in note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64])
def test_hashes_show_every_changed_bit(dtype):
    """The same bits have the same hash; a flipped sign, two of them, or two numbers that change places have another."""
    x = (torch.randn(3, 1001) * 8).to(dtype)
    assert hashed([x]) == hashed([x.clone()]) == hashed([x.T.contiguous().T])
    assert hashed([x[:, 1:]]) == hashed([x[:, 1:].clone()])
    y = x.clone()
    y[0, :2] = y[0, :2].flip(0)
    others = [y, x.roll(1, 1)]
    if dtype != torch.bool:
        others += [torch.where(torch.arange(1001) == 7, -x, x), torch.where(torch.arange(1001) % 500 == 7, -x, x)]
    assert all(hashed([other]) != hashed([x]) for other in others if not torch.equal(other, x))
    assert hashed([x, y]) != hashed([y, x]) or torch.equal(x, y)
