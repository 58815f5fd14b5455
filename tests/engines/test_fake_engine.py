"""The protocol, by an engine that shares no code with ours: compared with transformers, its faults are named."""

from __future__ import annotations

import pytest
import torch
from tests.engines.fake_engine import FakeEngine

from noisescope.data.dataset import Item, gather
from noisescope.engines.compare import compare_systems


def test_a_healthy_engine_differs_by_round_off(tiny, prompts):
    a = tiny()
    b = FakeEngine(a.model)
    found = compare_systems(a, b, (prompts, prompts))
    assert (found.verdict, found.causes) == ("round-off", ())
    assert 0 < found.token_gap.value < 1e-4
    assert found.remainder.value < 0.05 * found.total.value
    assert found.total.value == pytest.approx(found.round_off.value + found.remainder.value)
    assert found.b.engine == "fake" and found.b.prefix_cache is False


def test_it_speaks_for_itself(tiny, prompts):
    """What the comparison does not ask of every engine: encoding, generation, calls by name."""
    a = tiny()
    b = FakeEngine(a.model)
    assert b.generate(prompts[0], 3) == a.generate(prompts[0], 3)
    data = gather([Item(0, text="some text")], "here")
    assert len(b.encode(data, 4)[0]) == 4
    assert {site.module for site in b.sites} == {site.module for site in a.sites}


@pytest.mark.parametrize(
    ("step", "change", "named", "layers", "words"),
    [
        ("model.layers.1.mlp.gate_proj", lambda x: x.bfloat16().float(), "linear mlp.gate_proj", (1,), "to bfloat16"),
        ("model.layers.2.input_layernorm", lambda x: 1.01 * x, "norm input_layernorm", (2,), "a's times 1.01"),
        ("model.layers.0.self_attn.scores", lambda x: 1.2 * x, "between self_attn", (0,), "scores differ"),
        ("lm_head", lambda x: x + 0.1, "linear lm_head", (), "the same numbers to every token"),
    ],
)
def test_a_wrong_operator_is_named(tiny, prompts, step, change, named, layers, words):
    """A merged projection is spoilt as one; the sites are still those of its parts."""
    a = tiny()
    b = FakeEngine(a.model, lambda name, x: change(x) if name == step else x)
    found = compare_systems(a, b, (prompts, prompts))
    assert found.verdict == "different"
    first = found.causes[0]
    assert first.stage == "operators" and first.name.startswith(named) and first.layers == layers
    assert words in first.words
    healthy = compare_systems(a, FakeEngine(a.model), (prompts, prompts))
    removed = sum(cause.nats.value for cause in found.causes)
    assert removed == pytest.approx(found.total.value - healthy.total.value, rel=0.05)


def test_wrong_state_of_another_engine_is_mended(tiny, prompts):
    """Weights and settings are written through the protocol, and put back."""
    a = tiny()
    b = FakeEngine(a.model)
    b.scale *= 1.5
    b.w["model.layers.1.self_attn.o_proj.weight"] *= 2
    kept = {name: x.clone() for name, x in b.tensors()}
    found = compare_systems(a, b, (prompts, prompts))
    assert [cause.name for cause in found.causes] == ["setting scaling", "damaged weight"]
    assert "is the reference's times 2" in found.causes[1].words
    assert found.round_off.value < 1e-9
    assert all(torch.equal(x, kept[name]) for name, x in b.tensors())


def test_a_reference_that_can_not_be_called_leaves_a_remainder(tiny, prompts):
    """The fake engine applies linears alone: what attention does wrong can't be mended with it, and is printed."""
    b = tiny()
    b.model.model.layers[1].self_attn.scaling *= 1.3
    a = FakeEngine(b.model)
    a.settings = dict  # type: ignore[method-assign]
    found = compare_systems(a, b, (prompts, prompts))
    assert found.causes[0].name.startswith("between self_attn")
    assert found.causes[0].nats.value == pytest.approx(0, abs=1e-12)
    assert "a can't run it on b's inputs" in found.causes[0].words
    assert found.remainder.value == pytest.approx(found.total.value, rel=0.01)
