"""What a gate watches: how far noise moves the output over whole samples, one number a sample.

A score looks at the answer alone. That is often a token or two, and what noise does to them differs from sample to
sample by orders of magnitude: on the bundled model the log of a sample's KL has a standard deviation of 2.2 (predicted,
noise in all products) to 3.4 (injected, one seed), so that two sets of 50 samples tell a factor of three from none, at
best. Over every token of a sample it is 0.2 to 0.6, and they tell 1.2 from none. `diagnose` keeps these numbers in its
report, and a later gate measures the same of another model.
"""

from __future__ import annotations

import math

import numpy as np

from noisescope.diagnosis import operators, screen
from noisescope.diagnosis.context import GROUP, Array, Frame
from noisescope.diagnosis.sections import GateNumbers
from noisescope.trials import Results, Trial

OPERATORS = (GROUP, "softmax", "silu", "gelu", "norm")  # those of the original method notes, products as one
CLEAN = "clean"
DIGITS = 6


def propose(frame: Frame, results: Results) -> list[Trial]:
    """The screen over whole samples; and where noise is injected at all, that in all products, whole and scored."""
    if not frame.whole:
        return []
    over, products = frame.over_whole, operators.injection(frame, GROUP)
    trials = frame.ask(None) + over.ask(None) + screen.propose(over, results)
    if frame.settings.effort != "screen" and GROUP in frame.present:
        trials += over.ask(products) + frame.ask(products)
    return trials


def conclude(frame: Frame, results: Results) -> GateNumbers | None:
    """Numbers by operator and sample; None where nothing was asked, or the model itself failed."""
    if not frame.whole:
        return None
    over = frame.over_whole
    clean, screened = over.answer(results, None), screen.conclude(over, results)
    if clean is None or clean.error:
        return None
    present = [name for name in OPERATORS if name in frame.present]
    predicted = {}
    if screened is not None and not screened.error:
        predicted = {name: screened.predicted_by(operators.injection(frame, name)) for name in present}
    injected = over.answer(results, operators.injection(frame, GROUP)) if GROUP in present else None
    measured = injected is not None and not injected.error
    return GateNumbers(
        samples=frame.names,
        noise=repr(frame.settings.perturbation),
        seeds=frame.settings.seeds,
        metric=frame.metric,
        chance=frame.chance,
        predicted_kl={name: _numbers(values) for name, values in predicted.items()},
        kl={GROUP: _numbers(injected.mean("kl"))} if injected is not None and measured else {},
        accuracy={name: _numbers(values) for name, values in _scores(frame, results, present).items()},
        nonfinite=clean.nonfinite + (injected.nonfinite if injected is not None and measured else 0),
    )


def _scores(frame: Frame, results: Results, present: list[str]) -> dict[str, Array]:
    """The metric of each sample, clean and under noise in each operator that was injected; a broken answer is 0."""
    injections = {CLEAN: None, **{name: operators.injection(frame, name) for name in present}}
    answers = {name: frame.answer(results, injection) for name, injection in injections.items()}
    return {
        name: np.nan_to_num(answer.values(frame.metric), posinf=0.0, neginf=0.0).mean(0)
        for name, answer in answers.items()
        if answer is not None and not answer.error
    }


def _numbers(values: Array) -> tuple[float | None, ...]:
    """As JSON has them: None for what is not finite."""
    return tuple(float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values)
