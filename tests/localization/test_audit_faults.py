"""The audit on the demo model: a fault is named where it sits, and nothing is named on text of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.faults import faulty
from noisescope.localization.audit import audit
from noisescope.localization.inputs import batches_for


@pytest.fixture(scope="module")
def demo(shallow_demo: Callable[..., ns.Subject]) -> ns.Subject:
    return shallow_demo(4)


@pytest.mark.parametrize(
    ("fault", "place", "operator", "kind"),
    [
        ("stuck_bit:bit=16@0/linear/q_proj", 0, "linear", "stuck bit"),
        ("noise:0.05@1/matmul", 1, "matmul", "noise"),
        ("exp_table@2/softmax", 2, "softmax", "function table"),
        ("stale_tile@3/linear/k_proj", 3, "linear", "stale data"),
        ("dead_zone:0.1@1", 1, "residual", "dead zone"),
        ("saturation:0.3@2", 2, "residual", "saturation"),
        ("bias:0.01@0", 0, "residual", "bias"),
        ("spike:0.3@3", 3, "residual", "spike"),
        ("gain:0.01@lm_head", "lm_head", "linear", "gain"),
        ("bias:0.1@final_norm", "final_norm", "norm", "bias"),
    ],
)
def test_faults_are_named(demo: ns.Subject, fault: str, place: Any, operator: str, kind: str) -> None:
    """Layer, operator and kind; what comes after the fault is judged on the inputs it got, and is healthy."""
    with faulty(demo.model, fault) as scope:
        verdict = audit(demo, quick=True)
    assert scope.changed > 0 and verdict.verdict == "faulty"
    first = verdict.suspects[0]
    assert (first.site.place, first.site.operator, first.fault_class) == (place, operator, kind), first.evidence
    assert {suspect.site.place for suspect in verdict.suspects} == {place}


def test_sixteen_bits(shallow_demo: Callable[..., ns.Subject]) -> None:
    """A 1 % gain in bfloat16 is at most a few ulps, and is found."""
    subject = shallow_demo(4, "bfloat16")
    with faulty(subject.model, "gain:0.01@2/linear/down_proj"):
        verdict = audit(subject, quick=True)
    first = verdict.suspects[0]
    assert (first.site.place, first.site.module, first.fault_class) == (2, "model.layers.2.mlp.down_proj", "gain")


def test_a_fault_that_shows_only_in_a_fused_batch_is_still_named_inside_attention() -> None:
    """A few small probabilities, of the batch that runs fused: the same batch is taken apart as well."""
    subject = ns.load("demo", dtype="bfloat16")
    fault = "flush_to_zero:0.01,relative_to=rms@12/softmax"
    changed = []
    for batch in batches_for(subject.model, subject.tokenizer, None, 1):
        with faulty(subject.model, fault) as scope, torch.no_grad():
            subject.model(**batch)
        changed.append(scope.changed)
    assert changed[0] > 0 and changed[1] == 0
    with faulty(subject.model, fault):
        first = audit(subject, seed=1, quick=True).suspects[0]
    assert (first.site.place, first.site.operator, first.fault_class) == (12, "softmax", "flush to zero"), (
        first.evidence
    )


def test_infinities_of_a_fault_do_not_stop_the_audit(shallow_demo: Callable[..., ns.Subject]) -> None:
    """Spikes beyond float16 leave NaN in every row that follows: what can't be judged there is left out."""
    subject = shallow_demo(4, "float16")
    with faulty(subject.model, "gain:1e6@1"):
        verdict = audit(subject, quick=True)
    assert (verdict.suspects[0].site.place, verdict.suspects[0].site.operator) == (1, "residual")


def test_text_of_ones_own(demo: ns.Subject) -> None:
    """Texts are tokenised with the subject's tokenizer; the model, as it comes, is healthy."""
    assert audit(demo, ["Ann has 3 apples .", "Bob has 4 ."], quick=True).verdict == "healthy"
