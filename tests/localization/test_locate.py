"""`locate`: the audit where it is sure, relations where it could not look, "undecided" where neither could."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import Bias, StuckBit, Truncation, faulty
from noisescope.localization.verdict import Verdict
from noisescope.sites import Site
from noisescope.testing import tiny_model


class PackedQuantLinear(nn.Module):
    """Eight-bit weights with one scale a row, as quantisers keep them, and a handle that can't be copied."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.handle = threading.Lock()

    def forward(self, x):
        with self.handle:
            return x @ (self.weight.float() * self.scale).T


@pytest.fixture
def packed() -> nn.Module:
    model = tiny_model("llama", layers=3)
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(mlp, name, PackedQuantLinear(getattr(mlp, name)))
    return model


def test_auto_stops_after_the_audit_where_that_is_sure():
    """A healthy model of 12 layers costs as many forwards as its phases have."""
    verdict = ns.locate(tiny_model("llama", layers=12), quick=True)
    assert (verdict.verdict, verdict.method, verdict.forwards) == ("healthy", "auto: audit", 4)


def test_auto_goes_on_with_relations_where_the_audit_is_blind(packed):
    """Code that the host can't run leaves the audit undecided; laws need none, and only its block is searched."""
    audited, verdict = ns.locate(packed, method="audit", quick=True), ns.locate(packed, quick=True)
    assert audited.verdict == "undecided"
    (left_out,) = audited.coverage.not_judged
    assert left_out.modules == tuple(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
    assert "can't be run on the host" in left_out.reason
    assert (verdict.verdict, verdict.method) == ("undecided", "auto: audit, relations")  # laws have blind spots
    assert audited.forwards < verdict.forwards <= 18
    assert verdict.smallest_visible["linear, by relations"]["noise"]["size"] == 0
    assert verdict.smallest_visible["linear"] == audited.smallest_visible["linear"]


@pytest.mark.parametrize("fault", [StuckBit(20), Bias(0.05), Truncation(10)], ids=lambda fault: fault.family)
def test_auto_finds_a_fault_where_the_audit_is_blind(packed, fault):
    """The module and the class come from the laws that it breaks."""
    module = "model.layers.1.mlp.down_proj"
    with faulty(packed, fault, 1, operator="linear", module=module):
        verdict = ns.locate(packed, quick=True)
    first = verdict.suspects[0]
    assert (verdict.verdict, verdict.method) == ("faulty", "auto: audit, relations")
    assert (first.site.module, first.fault_class) == (module, fault.fault_class)


def test_packed_weights_are_judged_by_the_code_of_their_class(packed):
    """Where the host can run it, no formula is needed, and a wrong output is named."""
    mlp = packed.model.layers[1].mlp
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        linear.handle = contextlib.nullcontext()
    verdict = ns.locate(packed, quick=True)
    assert (verdict.verdict, verdict.method, verdict.coverage.not_judged) == ("healthy", "auto: audit", ())
    mlp.up_proj.forward = lambda x: PackedQuantLinear.forward(mlp.up_proj, x) * 1.01
    first = ns.locate(packed, quick=True).suspects[0]
    assert (first.site.module, first.site.tensor, first.fault_class) == ("model.layers.1.mlp.up_proj", "output", "gain")


def test_what_no_method_can_judge_stays_undecided():
    """A module of every block whose code the host can't run: nothing is found, and nobody says healthy."""
    model = tiny_model("llama", layers=2)

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.handle = threading.Lock()

        def forward(self, x):
            with self.handle:
                return x.tanh()

    for block in model.model.layers:
        block.mlp = Locked()
    verdict = ns.locate(model, quick=True)
    assert verdict.verdict == "undecided"
    assert [each.module_class for each in verdict.coverage.not_judged] == ["Locked"]
    assert verdict.coverage.modules.share < 0.95
    assert verdict.headline.startswith("no fault in the 91 % that was judged")


def test_relations_are_a_method_of_their_own():
    """And a method that is not there is refused with those that are."""
    model = tiny_model("llama")
    assert ns.locate(model, method="relations").method == "relations"
    with pytest.raises(InvalidInput, match="relations"):
        ns.locate(model, method="relation")


def test_adapters_are_healthy():
    """A LoRA model by every method that calls modules: its wrapper takes any argument, and still keeps no cache."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), lora)
    for method in ("auto", "relations", "scans"):
        assert ns.locate(model, method=method, quick=method == "auto").verdict == "healthy", method


def test_asking_twice_gives_the_same_answer():
    """Nothing of the model is changed by being looked at."""
    model = tiny_model("llama", layers=3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    verdicts = [ns.locate(model, method=method) for method in ("audit", "relations", "audit")]
    assert {verdict.verdict for verdict in verdicts} == {"healthy"}
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_what_hooks_do_is_judged():
    """A hook that only looks changes nothing; one that changes an output is no code of the model's classes."""
    model, seen = tiny_model("llama", layers=2), []
    linear = model.model.layers[0].mlp.up_proj
    linear.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert ns.locate(model, quick=True).verdict == "healthy" and seen
    linear.register_forward_hook(lambda module, args, y: 1.02 * y)
    first = ns.locate(model, quick=True).suspects[0]
    assert (str(first.site), first.fault_class) == (
        "input of linear at block 0 (model.layers.0.mlp.down_proj)",
        "gain",
    )


def test_arguments_of_another_method_are_refused():
    """Rather than left out in silence."""
    model = tiny_model("llama")
    with pytest.raises(InvalidInput, match="compares with no other system"):
        ns.locate(model, method="relations", reference=object())
    for method in ("srdd", "replay"):
        with pytest.raises(InvalidInput, match="inputs are for audit and relations"):
            ns.locate(model, method=method, inputs=torch.tensor([[1, 2]]), reference=None)


@pytest.mark.parametrize("tensor", ["input", "weight"])
def test_relations_never_close_what_the_data_flow_left_open(tensor, monkeypatch):
    """They call modules by themselves: what lies between two modules is none of their business."""
    model = tiny_model("llama")
    site = Site("linear", 1, "model.layers.1.mlp.up_proj", tensor=tensor)
    assert ns.locate(model, method="relations").verdict == "healthy"
    monkeypatch.setattr(
        "noisescope.localization.audit.audit", lambda *args, **kwargs: Verdict("undecided", "audit", unseen=(site,))
    )
    verdict = ns.locate(model)
    assert verdict.verdict == "undecided"
    assert site in verdict.unseen
