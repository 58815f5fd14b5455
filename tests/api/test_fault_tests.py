"""Fault tests carried out on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.api.fault_tests import _recovered, run_fault_tests
from noisescope.model.forwards import stepwise_logits
from noisescope.model.loading import Subject
from noisescope.plans.fault_tests import Criteria, FaultParameters, FaultTest, FaultTestResult


@pytest.fixture(scope="module")
def subject() -> Subject:
    return ns.load("tiny:llama")


@pytest.fixture(scope="module")
def data(subject: Subject) -> list[dict[str, torch.Tensor]]:
    """Long prompts, of whose tokens the last is the model's own answer."""
    ids = torch.randint(3, 64, (12, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = subject.model(ids).logits[:, -1:].argmax(-1)
    labels = torch.cat([torch.full_like(ids, -100), answers], 1)
    return [{"input_ids": torch.cat([ids, answers], 1), "labels": labels}]


POISONED = ["gain:1e39,start=1,duration=1@0/residual"]  # one token beyond the range of float32: NaN in the cache


def case(faults: list[str], **criteria: Any) -> FaultTest:
    return FaultTest("T", "something", "t", FaultParameters(tuple(faults)), Criteria(**criteria))


def run(subject: Subject, data: Any, *tests: FaultTest) -> list[FaultTestResult]:
    return run_fault_tests(subject, tests, data, samples=12)


def test_steps_give_what_a_whole_forward_gives(subject):
    """Token by token with the cache, the same predictions."""
    ids = torch.arange(5, 17)
    with torch.no_grad():
        whole = subject.model(ids[None]).logits[0]
    assert torch.allclose(stepwise_logits(subject.model, ids.tolist(), 4), whole[3:-1], atol=1e-5)


def test_losses_are_measured(subject, data):
    """A fault that wipes out a block's output costs accuracy; one that changes nothing decides nothing."""
    rows = run(
        subject,
        data,
        case(["dead_lane:channels=all@1/residual"], max_degradation=0.05),
        case(["dead_zone:0@1"], max_degradation=0.05),
    )
    assert [row.verdict for row in rows] == ["fail", "undecided"]
    assert rows[0].criteria[0].value > 0.5 and "changed nothing" in rows[1].message
    assert all(row.seconds > 0 for row in rows)


def test_hits_are_counted(subject, data):
    """One call per sample and layer; every element of a wiped output that was not 0 has changed."""
    (wiped,) = run(subject, data, case(["dead_lane:channels=all@1/residual"], max_degradation=0.05))
    hits, width = wiped.measured.hits, subject.model.config.hidden_size
    assert hits.calls == hits.acted == 12 and hits.changed == 12 * 15 * width
    (both,) = run(subject, data, case(["dead_lane:channels=0@0/residual", "gain:0@1/residual"], max_degradation=0.05))
    assert both.measured.hits.calls == 24 and both.measured.hits.changed == 12 * 15
    assert "acted in 24 of 24 calls and changed 180 elements" in both.message
    (rare,) = run(subject, data, case(["bit_flip:rate=0.01@*/linear"], max_degradation=1.0))
    assert rare.measured.hits.acted < rare.measured.hits.calls


def test_outputs_that_are_not_finite_are_counted(subject, data):
    """A gain beyond the range of float32 makes every token NaN or infinite."""
    (row,) = run(subject, data, case(["gain:1e39@*/residual"], max_nan_rate=0.001))
    assert row.verdict == "fail" and row.criteria[0].value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wrong", "steps"),
    [([], 0), ([1], 2), ([1, 3], 4), ([4], 5), ([5], None), ([1, 2, 3, 4, 5], None)],
)
def test_the_step_at_which_it_is_right_again(wrong, steps):
    """And stays so; none where the last step watched is wrong. The faulty step itself does not count."""
    clean = torch.zeros(7, dtype=torch.int64)  # one before the fault, the faulty one, five after it
    faulted = clean.clone()
    faulted[1] = 9
    faulted[[1 + step for step in wrong]] = 9
    assert _recovered(clean, faulted) == steps


def test_a_fault_of_one_step_recovers_or_not(subject, data):
    """What a block wiped out for one token leaves in the cache, or NaN there for ever; a small gain is forgotten."""
    wiped, poisoned, small = run(
        subject,
        data,
        case(["dead_lane:channels=all,start=1,duration=1@0/residual"], recovery_time="< 5 steps"),
        case(POISONED, recovery_time="< 5 steps"),
        case(["gain:1e-6,start=1,duration=1@0/residual"], recovery_time="< 5 steps"),
    )
    assert small.verdict == "pass" and small.criteria[0].value == 0
    assert wiped.verdict == "fail" and wiped.criteria[0].value == max(wiped.measured.recovery_steps) >= 5
    assert poisoned.verdict == "fail" and poisoned.criteria[0].value is None
    assert "12 of 12 samples did not recover within the steps observed, < 5 steps required" in poisoned.message
    assert wiped.measured.hits.acted == 12  # one step of each sample


@pytest.mark.parametrize(("tokens", "watched"), [(7, 0), (8, 12)])
def test_samples_too_short_to_fail_recovery_decide_nothing(subject, data, tokens, watched):
    """Under five steps after the fault nothing is known: no pass, however it ends."""
    short = [{name: tensor[:, -tokens:] for name, tensor in batch.items()} for batch in data]
    (row,) = run(subject, short, case(POISONED, recovery_time="< 5 steps"))
    assert (row.measured.recovery_steps if row.measured else ()) == (None,) * watched
    assert row.verdict == ("fail" if watched else "undecided")
    assert ("samples of at least 8 tokens" in row.message) is not bool(watched)


def test_faults_are_to_be_found(subject, data):
    """The locator is asked while the fault is in, and must name its layer."""
    (row,) = run(
        subject,
        data,
        case(
            ["stuck_lane:1,channels=3@1/linear/model.layers.1.mlp.down_proj"],
            detection_required=True,
            max_degradation=1.0,
        ),
    )
    found = {one.criterion: one for one in row.criteria}
    assert found["detection_required"].value is True and "down_proj" in found["detection_required"].message


def test_a_test_that_can_not_run_does_not_stop_the_others(subject, data):
    """A place that the model lacks is a result without a verdict; each result is passed on as it comes."""
    seen: list[Any] = []
    tests = [case(["gain:1@99"], max_degradation=0.1), case(["gain:1e-7@0"], max_degradation=0.9)]
    rows = run_fault_tests(subject, tests, data, samples=2, on_result=seen.append)
    assert rows == seen and rows[0].verdict == "undecided" and "could not be run" in rows[0].message
    assert rows[1].criteria


def test_the_model_is_left_as_it_was(subject, data):
    """After all tests it computes what it did before."""
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        before = subject.model(ids).logits
        run(subject, data, case(["spike:50@0"], max_degradation=0.1))
        assert torch.equal(subject.model(ids).logits, before)
