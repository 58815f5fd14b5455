"""Clipped ranges fit the inputs of each linear, wherever a plan is scored, refined or measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import noisescope as ns
from noisescope.data.tokens import Encoded, Sequence
from noisescope.errors import InvalidInput
from noisescope.measures.format_costs import is_planned, plan_injection, weight_format
from noisescope.model.anatomy import dissect, linear_weight
from noisescope.probe.formats import quantise
from noisescope.runs.batches import Material
from noisescope.runs.trial_runner import TrialRunner, conditions
from noisescope.testing import tiny_model
from noisescope.trials import Slice, Trial

DRAW = torch.Generator().manual_seed(2)
LENGTHS = (9, 7, 9, 4, 8, 9)
TOKENS = torch.randint(1, 60, (len(LENGTHS), 9), generator=DRAW)
CLIPPED = weight_format("int4_clipped")


def material(first: int, last: int) -> Material:
    rows = list(enumerate(LENGTHS))[first:last]
    groups = [(Sequence(i, tuple(TOKENS[i, :n].tolist()), 1, 1),) for i, n in rows]
    return Material(Encoded(tuple(groups), 0, sum(n for _, n in rows)), "text")


SCORED, HELD_OUT = material(0, 3), material(3, 6)
SAMPLES = Slice(SCORED.fingerprint, 0, 3)


def with_outliers(name: str = "llama") -> Any:
    """Some inputs of each linear behind a norm are 30 times as large."""
    model = tiny_model(name, initializer_range=0.2)
    with torch.no_grad():
        for module, weight in model.named_parameters():
            if "norm" in module:
                weight[::16] *= 30
    return model


@torch.no_grad()
def by_hand(model: Any, *, squared: bool) -> Any:
    """A copy whose linears were rounded, with or without the squares of what they read in the scored samples."""
    rounded = copy.deepcopy(model)
    modules, names = dict(rounded.named_modules()), [u.module for u in dissect(model).units if is_planned(u)]
    read: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, held=read[name]: held.append(args[0][0]))
        for name, module in model.named_modules()
        if name in read
    ]
    for row, length in zip(TOKENS[:3], LENGTHS, strict=False):
        model(row[None, :length])
    for hook in hooks:
        hook.remove()
    for name in names:
        weight = linear_weight(modules[name])
        squares = torch.cat(read[name]).square().mean(0) if squared else None
        weight.copy_(quantise(weight, CLIPPED, weight=True, importance=squares))
    return rounded


@torch.no_grad()
def kl_by_hand(model: Any, rounded: Any, rows: range) -> list[float]:
    found = []
    for i in rows:
        ids = TOKENS[i : i + 1, : LENGTHS[i]]
        p, q = (m(ids).logits[0, :-1].double().log_softmax(-1) for m in (model, rounded))
        found.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [None, 1])
def test_a_plan_is_carried_out_with_the_inputs_of_the_scored_samples(name: str, batch: int | None) -> None:
    """Measured on other samples; the same at any batch size; and better than ranges that fit the weights alone."""
    model = with_outliers(name)
    subject = ns.wrap(model)
    plan = dict.fromkeys((u.module for u in subject.anatomy.units if is_planned(u)), "int4_clipped")
    part = Slice(HELD_OUT.fingerprint, 0, 3)
    trials = [Trial(conditions(subject), "score", part, plan_injection(plan, at)) for at in (SAMPLES, None)]
    with TrialRunner(subject, [HELD_OUT, SCORED]) as runner:
        runner._batch_size = batch
        fitted, plain = (runner.run(trial).values["kl"] for trial in trials)
    assert trials[0].id != trials[1].id
    assert fitted == pytest.approx(kl_by_hand(model, by_hand(model, squared=True), range(3, 6)), rel=2e-3)
    assert plain == pytest.approx(kl_by_hand(model, by_hand(model, squared=False), range(3, 6)), rel=2e-3)
    if name == "llama":
        assert sum(fitted) < 0.9 * sum(plain)


def test_scores_and_slopes_are_of_the_same_rounding() -> None:
    """A change to what is there already has no slope; and a plan that is refined costs what it costs when measured."""
    model = with_outliers()
    subject = ns.wrap(model)
    names = [u.module for u in subject.anatomy.units if is_planned(u)]
    plan = plan_injection(dict.fromkeys(names, "int4_clipped"), SAMPLES)
    settings = {"formats": ("int4_clipped", "int4_asymmetric"), "draws": 1, "seed": 0}
    with TrialRunner(subject, [SCORED]) as runner:
        slopes = runner.run(Trial(conditions(subject), "format_slopes", SAMPLES, plan, settings))
        measured = runner.run(Trial(conditions(subject), "score", SAMPLES, plan))
        scores = runner.run(Trial(conditions(subject), "formats", SAMPLES, None, settings)).arrays["predicted"]
    assert not slopes.failed and all(row[0] == 0 != row[1] for row in slopes.facts["slopes"].values())
    assert slopes.values["kl"] == pytest.approx(measured.values["kl"], rel=1e-3)
    assert slopes.values["kl"] == pytest.approx(kl_by_hand(model, by_hand(model, squared=True), range(3)), rel=2e-3)
    clipped, asymmetric = scores.sum((0, 2))
    assert clipped < asymmetric


def test_outside_a_measurement_the_inputs_are_missing() -> None:
    """Rather than ranges that fit the weights alone."""
    model = tiny_model("llama")
    injection = plan_injection({"model.layers.0.mlp.up_proj": "int4_clipped"}, SAMPLES)
    assert injection is not None
    with pytest.raises(InvalidInput, match="needs the inputs of each linear"), ns.inject(model, injection):
        model(TOKENS[:1])


def test_fused_experts_are_rounded_for_their_weights_alone() -> None:
    subject = ns.wrap(tiny_model("mixtral"))
    plan = dict.fromkeys((u.module for u in subject.anatomy.units if is_planned(u)), "int4_clipped")
    trial = Trial(conditions(subject), "score", SAMPLES, plan_injection(plan, SAMPLES))
    with TrialRunner(subject, [SCORED]) as runner:
        found = runner.run(trial)
    assert not found.failed, found.error
    assert all(value is not None and value > 0 for value in found.values["kl"])
