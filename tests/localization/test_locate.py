"""`locate`: the audit where it is sure, relations where it could not look, "undecided" where neither could."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import StuckBit, faulty
from noisescope.localization.verdict import Verdict
from noisescope.sites import Site
from noisescope.testing import tiny_model


class PackedQuantLinear(nn.Module):
    """Eight-bit weights with one scale a row, as quantisers keep them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight.float() * self.scale).T


@pytest.fixture
def packed() -> nn.Module:
    model = tiny_model("llama", layers=3)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = PackedQuantLinear(mlp.down_proj)
    return model


def test_auto_stops_after_the_audit_where_that_is_sure():
    """A healthy model of 28 layers costs three forwards, of ten that are allowed."""
    verdict = ns.locate(tiny_model("llama", layers=28))
    assert (verdict.verdict, verdict.method, verdict.forwards) == ("healthy", "auto: audit", 3)


def test_auto_goes_on_with_relations_where_the_audit_is_blind(packed):
    """A weight that the host can't read leaves the audit undecided; laws need none, and only its block is searched."""
    audited, verdict = ns.locate(packed, method="audit"), ns.locate(packed)
    assert audited.verdict == "undecided"
    assert [site.module for site in audited.unseen] == ["model.layers.1.mlp.down_proj"]
    assert (verdict.verdict, verdict.method, verdict.unseen) == ("healthy", "auto: audit, relations", ())
    assert audited.forwards < verdict.forwards <= 10
    assert verdict.smallest_visible["linear, by relations"]["noise"]["size"] == 0
    assert verdict.smallest_visible["linear"] == audited.smallest_visible["linear"]


def test_auto_finds_a_fault_where_the_audit_is_blind(packed):
    """The module and the class come from the laws that it breaks."""
    module = "model.layers.1.mlp.down_proj"
    with faulty(packed, StuckBit(20), 1, operator="linear", module=module):
        verdict = ns.locate(packed)
    first = verdict.suspects[0]
    assert (verdict.verdict, verdict.method) == ("faulty", "auto: audit, relations")
    assert (first.site.module, first.fault_class) == (module, "stuck bit")


def test_what_no_method_can_judge_stays_undecided():
    """Blocks whose output is no sum of their parts: neither finds anything, neither says healthy."""
    model = tiny_model("llama", layers=2)

    class Scaled(type(model.model.layers[0])):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 1.001

    for block in model.model.layers:
        block.__class__ = Scaled
    verdict = ns.locate(model)
    assert (verdict.verdict, verdict.method) == ("undecided", "auto: audit, relations")
    assert [(site.operator, site.place) for site in verdict.unseen] == [("residual", 0), ("residual", 1)]
    assert verdict.to_dict()["unseen"][1] == "residual at block 1 (model.layers.1)"


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
    for method in ("auto", "relations", "srdd"):
        assert ns.locate(model, method=method).verdict == "healthy", method


def test_asking_twice_gives_the_same_answer():
    """Nothing of the model is changed by being looked at."""
    model = tiny_model("llama", layers=3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    verdicts = [ns.locate(model, method=method) for method in ("audit", "audit", "relations", "audit")]
    assert {verdict.verdict for verdict in verdicts} == {"healthy"}
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_hooks_are_told_of():
    """What a forward hook changes is no operator's work: the verdict says that it did not look there."""
    model = tiny_model("llama", layers=2)
    assert not any("hooks" in note or "compiled" in note for note in ns.locate(model).notes)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, y: 1.02 * y)
    assert any(note.startswith("modules with forward hooks: 1.") for note in ns.locate(model).notes)


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
