"""`srdd`: the published probes computed as published, on noise that falls where it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import DeadZone, faulty
from noisescope.localization.srdd import Responses, composite, divergence, probes, srdd
from noisescope.testing import tiny_model

FAST = {"scales": (0.02, 0.05, 0.1), "trials": 2}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=4)


def made(values, scales=(0.01, 0.05, 0.1)) -> Responses:
    """Responses [layers, scales] that are alike in two trials and differ by a factor of 3 between two prompts."""
    rows = np.asarray(values, dtype=float)
    spread = rows[:, :, None, None] * np.ones((1, 1, 2, 1)) * np.array([0.5, 1.5])
    return Responses(spread, tuple(scales), tuple(range(len(rows))), 1)


def test_monotonicity_is_the_squared_rank_correlation():
    """1 for any rising response, however curved; that of scipy elsewhere; 0 for none at all."""
    found = probes(made([[1, 2, 300], [3, 1, 2], [5, 5, 5], [1, 4, 9]]))["monotonicity"][0]
    expected = stats.spearmanr((0.01, 0.05, 0.1), (3, 1, 2)).statistic ** 2
    assert found == pytest.approx([1, expected, 0, 1])


def test_smoothness_is_the_second_difference_of_logarithms_and_the_ends_score_nothing():
    """A layer ten times its neighbours stands out by log 10; the first and last layer get z = 0."""
    rows = [[s, s, s] for s in (1e-3, 1e-3, 1e-2, 1e-3, 1e-3, 1e-3)]
    values, z = probes(made(rows))["smoothness"]
    assert values[2] == pytest.approx(math.log(10), abs=1e-4)
    assert values[1] == pytest.approx(math.log(10) / 2, abs=1e-4)
    assert z[0] == z[-1] == 0
    assert z[1:-1] == pytest.approx(stats.zscore(values[1:-1]))
    assert int(np.argmax(z)) == 2


def test_invariance_and_compression():
    """std / mean over prompts at the scale next to 0.05, and the slope of a straight line."""
    found = probes(made([[1, 2, 3], [2, 2, 2], [4, 2, 0]]))
    assert found["invariance"][0] == pytest.approx([0.5, 0.5, 0.5])
    slopes = [np.polyfit((0.01, 0.05, 0.1), row, 1)[0] for row in ((1, 2, 3), (2, 2, 2), (4, 2, 0))]
    assert found["compression"][0] == pytest.approx(slopes, abs=1e-9)
    assert found["compression"][1] == pytest.approx(stats.zscore(found["compression"][0]))


def test_the_score_has_the_published_weights_and_sides():
    """Low monotonicity 1, high smoothness 1.5, high invariance 1, low compression 1.5; other sides count nothing."""
    suspicious = {"monotonicity": -1.0, "smoothness": 2.0, "invariance": 4.0, "compression": -8.0}
    found = {name: (np.zeros(2), np.array([z, -z])) for name, z in suspicious.items()}
    assert composite(found) == pytest.approx([1 + 3 + 4 + 12, 0])


@given(st.lists(st.floats(-20, 20), min_size=3, max_size=8), st.floats(-3, 3))
def test_divergence_is_that_of_the_notes(logits, shift):
    """sum p log((p + 1e-6) / (q + 1e-6)), in float32; 0 for the same distribution."""
    clean = torch.tensor([logits], dtype=torch.float64)
    noisy = clean.roll(1, -1) * (1 + shift / 10)
    p, q = clean.softmax(-1), noisy.softmax(-1)
    expected = float((p * ((p + 1e-6) / (q + 1e-6)).log()).sum())
    assert float(divergence(clean, noisy)) == pytest.approx(max(expected, 0), abs=1e-5, rel=1e-4)
    assert float(divergence(clean, clean + shift)) == pytest.approx(0, abs=1e-6)


def test_every_layer_is_ranked_with_every_probe_and_nothing_is_claimed(model):
    """The verdict is undecided, suspects come by composite score, and the cost is what was run."""
    verdict = srdd(model, **FAST)
    assert (verdict.verdict, verdict.method) == ("undecided", "srdd")
    assert sorted(s.site.place for s in verdict.suspects) == [0, 1, 2, 3]
    scores = [s.score for s in verdict.suspects]
    assert scores == sorted(scores, reverse=True)
    assert verdict.forwards == 1 + 4 * 3 * 2
    for suspect in verdict.suspects:
        assert {"monotonicity", "smoothness", "invariance", "compression", "responses", "flags"} <= set(suspect.details)
        parts = [(1, -1, "monotonicity"), (1.5, 1, "smoothness"), (1, 1, "invariance"), (1.5, -1, "compression")]
        by_hand = sum(weight * max(0, side * suspect.details[f"{name}_z"]) for weight, side, name in parts)
        assert suspect.score == pytest.approx(by_hand)
        assert suspect.site.module == f"model.layers.{suspect.site.place}"
    assert any("healthy" in note for note in verdict.notes)


def test_the_response_grows_with_the_square_of_the_noise(model):
    """Noise that did not reach the model, or did not follow its scale, would not."""
    for suspect in srdd(model, **FAST).suspects:
        responses = suspect.details["responses"]
        assert 8 < responses["0.1"] / responses["0.02"] < 80


def test_noise_falls_on_one_layer_and_inside_the_fault_that_is_open(model):
    """Behind a block that gives zeros, noise before it can't be measured, and noise after it can."""
    with faulty(model, DeadZone(magnitude=1.1), 1):  # below 1.1 times the largest: everything
        verdict = srdd(model, **FAST)
    recorded = {s.site.place: max(s.details["responses"].values()) for s in verdict.suspects}
    assert recorded[0] == recorded[1] == 0
    quiet = srdd(model, **FAST, layers=(1, 2, 3))
    assert {s.site.place for s in quiet.suspects} == {1, 2, 3}
    assert all(max(s.details["responses"].values()) > 0 for s in quiet.suspects)


def test_the_seed_decides_and_the_callers_random_state_is_left_alone(model):
    """The same seed gives the same numbers, another one others."""
    state = torch.get_rng_state()
    one, same, other = (srdd(model, **FAST, seed=seed, prompts=[[3, 4, 5, 6]]).to_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert one == same
    assert one != other
    assert "forward" not in model.model.layers[0].__dict__


def test_logits_that_are_not_finite_are_said(model):
    """Nothing can be measured against NaN."""
    with faulty(model, "gain:1e39@3"):
        verdict = srdd(model, **FAST)
    assert (verdict.verdict, verdict.suspects) == ("undecided", ())
    assert "not finite" in verdict.notes[0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"layers": (1, 2)}, "at least 3"),
        ({"layers": (1, 2, 4)}, "out of range"),
        ({"scales": (0.1, 0.05)}, "increasing order"),
        ({"scales": (0.1,)}, "two or more"),
        ({"trials": 0}, "at least 1"),
    ],
)
def test_what_can_not_be_asked(model, arguments, reason):
    """Too few layers, layers that are not there, scales in no order, no trials."""
    with pytest.raises(InvalidInput, match=reason):
        srdd(model, **arguments)


def test_srdd_and_scans_are_methods_of_their_own(model):
    """Each runs under its name, and says what it can't see."""
    probes_verdict, scans_verdict = (ns.locate(model, method=method) for method in ("srdd", "scans"))
    assert (probes_verdict.method, probes_verdict.verdict) == ("srdd", "undecided")
    assert "composite score" in probes_verdict.suspects[0].evidence
    assert any("this method compares how" in note for note in probes_verdict.notes)
    assert (scans_verdict.method, scans_verdict.verdict) == ("scans", "healthy")
    assert any("scans can't detect" in note for note in scans_verdict.notes)


def test_a_layer_without_products_leaves_it_undecided():
    """Its forward was replaced: there is nothing that noise can be added to."""
    model = tiny_model("llama", layers=3)
    model.model.layers[1].forward = lambda x, *args, **others: x
    verdict = srdd(model)
    assert verdict.verdict == "undecided"
    assert "a layer can't be probed" in verdict.headline
