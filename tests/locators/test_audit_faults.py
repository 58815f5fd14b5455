"""The audit: healthy models of every kind are healthy, and a fault is named where it sits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import faulty
from noisescope.locators.audit import audit
from noisescope.testing import MODELS, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"transformer_encoder"}))  # that one takes no tokens
def test_healthy_models_are_healthy(name: str, dtype: torch.dtype) -> None:
    """No alarm in any architecture and dtype, and something was looked at."""
    verdict = audit(tiny_model(name).to(dtype))
    assert verdict.verdict != "faulty", [suspect.evidence for suspect in verdict.suspects]
    assert verdict.checked > 1000 and verdict.smallest_visible["linear"]["sites"] > 0


@pytest.fixture(scope="module")
def demo() -> ns.Subject:
    return ns.load("demo")


@pytest.mark.parametrize(
    ("fault", "place", "operator", "kind"),
    [
        ("gain:0.01@7/linear/down_proj", 7, "linear", "gain"),
        ("stuck_bit:bit=16@2/linear/q_proj", 2, "linear", "stuck bit"),
        ("dead_k_lane@9/linear/up_proj", 9, "linear", "dead input lane"),
        ("swapped_channels@11/linear/o_proj", 11, "linear", "swapped channels"),
        ("dead_lane@4/linear/gate_proj", 4, "linear", "dead lane"),
        ("noise:0.05@5/matmul", 5, "matmul", "noise"),
        ("exp_table@5/softmax", 5, "softmax", "function table"),
        ("activation_table@8/silu", 8, "silu", "function table"),
        ("norm_gain@3/norm", 3, "norm", "gain"),
        ("stale_tile@6/linear/k_proj", 6, "linear", "stale data"),
        ("dead_zone:0.1@10", 10, "residual", "dead zone"),
        ("saturation:0.3@12", 12, "residual", "saturation"),
        ("bias:0.01@13", 13, "residual", "bias"),
        ("spike:0.3@14", 14, "residual", "spike"),
        ("gain:0.01@lm_head", "lm_head", "linear", "gain"),
        ("bias:0.1@final_norm", "final_norm", "norm", "bias"),
    ],
)
def test_faults_are_named(demo: ns.Subject, fault: str, place: Any, operator: str, kind: str) -> None:
    """Layer, operator and kind; what comes after the fault is judged on the inputs it got, and is healthy."""
    with faulty(demo.model, fault) as scope:
        verdict = audit(demo)
    assert scope.changed > 0 and verdict.verdict == "faulty"
    first = verdict.suspects[0]
    assert (first.site.place, first.site.operator, first.fault_class) == (place, operator, kind), first.evidence
    assert {suspect.site.place for suspect in verdict.suspects} == {place}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype: str) -> None:
    """A 1 % gain in 16 bits is at most a few ulps, and is found."""
    subject = ns.load("demo", dtype=dtype)
    with faulty(subject.model, "gain:0.01@7/linear/down_proj"):
        verdict = audit(subject)
    first = verdict.suspects[0]
    assert (first.site.place, first.site.module, first.fault_class) == (7, "model.layers.7.mlp.down_proj", "gain")


def test_no_trace(demo: ns.Subject) -> None:
    """Outputs, random state and training mode are what they were."""
    tokens = torch.arange(12)[None]
    demo.model.train()
    try:
        state = torch.random.get_rng_state()
        with torch.no_grad():
            before = demo.model(tokens).logits
            audit(demo)
            assert torch.equal(demo.model(tokens).logits, before)
        assert torch.equal(torch.random.get_rng_state(), state) and demo.model.training
        assert not any("forward" in module.__dict__ for module in demo.model.modules())
    finally:
        demo.model.eval()


def test_inputs_of_ones_own(demo: ns.Subject) -> None:
    """Texts, token ids or batches; anything else is refused."""
    assert audit(demo, ["Ann has 3 apples .", "Bob has 4 ."]).verdict == "healthy"
    assert audit(demo, torch.arange(2, 34).reshape(2, 16)).verdict == "healthy"
    with pytest.raises(InvalidInput):
        audit(demo, 3)
    with pytest.raises(InvalidInput, match="rows"):
        audit(demo, rows=1)
