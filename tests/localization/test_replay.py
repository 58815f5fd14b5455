"""Replay: on a good device's inputs a healthy model is healthy, and a fault is named by the operator that makes it."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.testing import tiny_model

PROMPTS = [[(7 * p + 5 * t) % 60 + 3 for t in range(24)] for p in range(4)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def subject(request):
    return ns.wrap(tiny_model("llama", layers=3).to(request.param))


@pytest.fixture(scope="module")
def good(subject, tmp_path_factory):
    return ns.record(subject, output=tmp_path_factory.mktemp("good") / "a", prompts=PROMPTS, detail="full")


def test_a_healthy_model_is_healthy(subject, good):
    """Every recorded operator is looked at; auto takes the replay where there is a reference."""
    verdict = ns.locate(subject, reference=good.path)
    assert (verdict.verdict, verdict.method) == ("healthy", "auto: replay")
    assert {"linear", "norm", "silu", "attention", "embedding", "residual"} <= set(verdict.smallest_visible)
    assert verdict.forwards == 1 and verdict.notes == ()
    assert not any("forward" in vars(module) for module in subject.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral", "bloom", "bert", "t5", "gemma3"])
def test_other_architectures_are_healthy_too(name, tmp_path):
    """Also with position tables, norms of heads, routers, and two stacks."""
    subject = ns.wrap(tiny_model(name).bfloat16())
    good = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, detail="full")
    verdict = ns.locate(subject, reference=good)
    assert verdict.verdict == "healthy", verdict.suspects
    assert {"linear", "residual"} <= set(verdict.smallest_visible)


def test_errors_do_not_accumulate(tmp_path):
    """Round-off noise in every norm, which adds up over the layers, stays below the floor of each operator."""
    subject = ns.wrap(tiny_model("llama", layers=6))
    good = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, detail="full")
    with ns.inject(subject.model, ns.Injection(ns.Gaussian(2e-7), operators={"norm"}, seed=1)):
        assert ns.locate(subject, reference=good, method="replay").verdict == "healthy"


FAULTS = [
    ("gain:0.01@1/linear/down_proj", (1, "linear", "model.layers.1.mlp.down_proj"), "gain"),
    ("dead_zone:0.3@2", (2, "residual", "model.layers.2"), "dead zone"),
    ("bias:0.3@lm_head", ("lm_head", "linear", "lm_head"), "bias"),
    ("gain:0.05@0/silu", (0, "silu", "model.layers.0.mlp.act_fn"), "gain"),
    ("saturation:0.5@1/matmul", (1, "attention", "model.layers.1.self_attn"), None),
]


@pytest.mark.parametrize(("fault", "where", "kind"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_fault_is_named(subject, good, fault, where, kind):
    """Its layer, operator, module and class, and nothing after it is blamed."""
    with ns.faulty(subject.model, fault, anatomy=subject.anatomy):
        verdict = ns.locate(subject, method="replay", reference=good)
    assert verdict.verdict == "faulty"
    assert len(verdict.suspects) == 1
    suspect = verdict.suspects[0]
    assert (suspect.site.place, suspect.site.operator, suspect.site.module) == where
    assert kind is None or suspect.fault_class == kind


def test_what_lies_between_operators_is_judged_too(subject, good):
    """A hook that alters what down_proj is given: a gate or an add gone wrong."""
    module = subject.model.get_submodule("model.layers.1.mlp.down_proj")
    hook = subject.model.get_submodule("model.layers.1.mlp.up_proj").register_forward_hook(lambda m, a, y: y * 1.05)
    verdict = ns.locate(subject, reference=good)
    hook.remove()
    assert verdict.suspects[0].site.place == 1
    hook = module.register_forward_pre_hook(lambda m, args: (args[0] * 1.05,))
    verdict = ns.locate(subject, reference=good)
    hook.remove()
    assert verdict.suspects[0].site.module == "model.layers.1.mlp.down_proj"


def test_a_few_layers_are_enough(subject, tmp_path):
    """With whole tensors of one block only that block is judged, and the verdict says so."""
    some = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, full_layers={1})
    verdict = ns.locate(subject, reference=some)
    assert verdict.verdict == "healthy" and "only those were checked" in verdict.notes[-1]
    with ns.faulty(subject.model, "gain:0.02@1/linear/up_proj", anatomy=subject.anatomy):
        assert ns.locate(subject, reference=some).suspects[0].site.module == "model.layers.1.mlp.up_proj"


def test_what_is_refused(subject, good, tmp_path):
    """No reference, sketches alone, another model."""
    with pytest.raises(InvalidInput, match="needs the record of a good device"):
        ns.locate(subject, method="replay")
    sketches = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS)
    with pytest.raises(InvalidInput, match="holds only sketches"):
        ns.locate(subject, reference=sketches)
    with pytest.raises(InvalidInput, match="with a different model"):
        ns.locate(tiny_model("llama", layers=3, seed=1).to(next(subject.model.parameters()).dtype), reference=good)


def test_what_changes_the_logits_after_the_head_is_named(subject, good):
    """A hook on the head: no operator follows that could get another input."""
    handle = subject.model.lm_head.register_forward_hook(lambda module, given, y: y * 1.02)
    try:
        verdict = ns.locate(subject, method="replay", reference=good.path)
    finally:
        handle.remove()
    assert (verdict.suspects[0].site.place, verdict.suspects[0].fault_class) == ("lm_head", "gain")
