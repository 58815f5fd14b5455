"""A predicted KL with the bound of its error, and what is said where the measured one lies elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.diagnosis.report import Diagnosis
from noisescope.findings.finding import counted, span, times_better
from noisescope.jsonform import from_json, to_json
from noisescope.plans.precision import Budget, modules_of, optimal_plan, uniform_plan
from noisescope.plans.precision_results import Prediction, prediction_notes, prediction_of, prediction_sentence
from noisescope.stats import Estimate


def diagnosis_of(made: Any, scores: np.ndarray) -> Diagnosis:
    """A diagnosis of scores [modules, formats, samples], as diagnosis/format_costs.py makes it."""
    count = scores.shape[2]
    error = scores.std(2, ddof=1) / np.sqrt(count) if count > 1 else np.full(scores.shape[:2], np.nan)
    modules = [
        made.module_scores(
            f"m{i}",
            i,
            {
                name: (float(row[j].mean()), float(error[i, j]) if count > 1 else None)
                for j, name in enumerate(("int8", "int4", "int3"))
            },
        )
        for i, row in enumerate(scores)
    ]
    return made.diagnosis(made.about(samples=2 * count, tokens=6 * count), format_scores=made.scores(*modules, n=count))


def predicted(found: Diagnosis, name: str = "int4") -> Prediction:
    modules = modules_of(found)
    return prediction_of(found, modules, uniform_plan(modules, name))


@given(st.integers(0, 1000), st.floats(0, 1))
def test_the_bound_holds_whatever_the_correlation(made: Any, seed: int, shared: float) -> None:
    """The standard error of the sums by sample is never larger, and is reached where all modules vary alike."""
    rng = np.random.default_rng(seed)
    common, own = rng.exponential(size=(1, 1, 8)), rng.exponential(size=(5, 1, 8))
    scores = (shared * common + (1 - shared) * own) * np.array([0.1, 1.0, 10.0])[:, np.newaxis]
    sums = scores[:, 1].sum(0)
    exact, found = float(sums.std(ddof=1) / np.sqrt(8)), predicted(diagnosis_of(made, scores))
    assert found.value == pytest.approx(sums.mean())
    assert found.largest_standard_error is not None and found.largest_standard_error >= exact * (1 - 1e-9)
    if shared == 1:
        assert found.largest_standard_error == pytest.approx(exact)


def test_the_error_is_of_the_score_that_counts(made: Any) -> None:
    """Where int4 seems to cost less than int8, it is given int8's score, and so int8's error."""
    scores = np.array([[[2.0, 4.0], [1.0, 1.0], [9.0, 9.0]]])
    found = predicted(diagnosis_of(made, scores))
    assert found.value == 3.0 and found.largest_standard_error == pytest.approx(1.0)
    unused = predicted(diagnosis_of(made, np.zeros((1, 3, 2))))  # a module that costs nothing has an error, which is 0
    assert unused.value == unused.largest_standard_error == unused.high == 0.0


def test_it_comes_with_its_evidence(made: Any) -> None:
    """Samples, the tokens that they have on average, the error; of one sample there is none."""
    found = predicted(diagnosis_of(made, np.array([[[0.1], [0.2], [0.3]]])))
    assert prediction_sentence(found) == "0.2 (no standard error; 1 sample, about 3 tokens)"
    assert found.low is None and prediction_notes(found, Estimate(9.0, 8.0, 10.0, 9)) == []
    found = predicted(diagnosis_of(made, np.tile([[0.1, 0.3]], (1, 3, 1))))
    assert prediction_sentence(found) == "0.2 (standard error at most 0.1; 2 samples, about 6 tokens)"
    assert found.low == 0.0 and found.high == pytest.approx(0.2 + 12.706 * 0.1, rel=1e-4)
    assert from_json(Prediction, to_json(found)) == found


PREDICTION = Prediction(1e-2, 5e-3, 1.5e-2, 16, 0.95, None, 30)


@pytest.mark.parametrize(
    ("value", "low", "high", "where"),
    [
        (0.03, 0.02, 0.05, "above"),
        (0.03, 0.014, 0.05, None),  # the intervals meet
        (0.018, 0.017, 0.019, None),  # significantly larger, but not twice as large
        (1e-3, 5e-4, 2e-3, "below"),
        (4e-3, 2e-3, 6e-3, None),
        (0.03, None, None, None),
        (0.03, 0.02, None, "above"),  # "at least" is enough
    ],
)
def test_a_measured_kl_far_off_is_noted(value: float, low: float | None, high: float | None, where: str | None) -> None:
    """With both numbers, and what the prediction is good for; not where it may be chance, or is a small matter."""
    notes = prediction_notes(PREDICTION, Estimate(value, low, high, 64))
    assert len(notes) == (where is not None)
    for note in notes:
        end = "..." if high is None else f"{high:g}"
        assert f"[{low:g}, {end}] lies far {where} the predicted 0.01 [0.005, 0.015]" in note
        assert "16 samples, about 30 tokens" in note and "which is what the plan uses; its absolute size is not" in note


def test_plans_are_chosen_without_their_errors(made: Any) -> None:
    """Standard errors change no plan."""
    scores = np.random.default_rng(0).exponential(size=(12, 3, 4)) * np.array([0.01, 1.0, 4.0])[:, np.newaxis]
    found = diagnosis_of(made, scores)
    assert found.format_scores is not None
    bare = [
        replace(row, formats={name: replace(score, standard_error=None) for name, score in row.formats.items()})
        for row in found.format_scores.modules
    ]
    without = made.diagnosis(made.about(samples=8, tokens=24), format_scores=made.scores(*bare))
    assert optimal_plan(modules_of(without), Budget(5)) == optimal_plan(modules_of(found), Budget(5))
    assert predicted(without).largest_standard_error is None


def test_numbers_in_words() -> None:
    """One is singular, an end without bound is open, a divisor below 1 makes things worse."""
    assert [counted(n, "sample") for n in (0, 1, 2)] == ["0 samples", "1 sample", "2 samples"]
    assert span(Estimate(0.2, None, 0.5, 9), ".1f", 100) == "[..., 50.0]"
    assert [times_better(gain) for gain in (2.5, 0.04, 0.0)] == ["2.5 x better", "25 x worse", "no gain possible"]
