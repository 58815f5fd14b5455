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
from noisescope.diagnosis.context import GROUP, Array, StudyContext
from noisescope.diagnosis.sections import GateNumbers
from noisescope.trials import Results, Trial

OPERATORS = (GROUP, "softmax", "silu", "gelu", "norm")  # those of the original method notes, products as one
CLEAN = "clean"
DIGITS = 6


def propose(context: StudyContext, results: Results) -> list[Trial]:
    """The screen over whole samples; and where noise is injected at all, that in all products, whole and scored."""
    if not context.whole:
        return []
    over, products = context.over_whole, operators.injection(context, GROUP)
    trials = context.ask(None) + over.ask(None) + screen.propose(over, results)
    if context.settings.effort != "screen" and GROUP in context.present:
        trials += over.ask(products) + context.ask(products)
    return trials


def conclude(context: StudyContext, results: Results) -> GateNumbers | None:
    """Numbers by operator and sample; None where nothing was asked, or the model itself failed."""
    if not context.whole:
        return None
    over = context.over_whole
    clean, screened = over.answer(results, None), screen.conclude(over, results)
    if clean is None or clean.error:
        return None
    present = [name for name in OPERATORS if name in context.present]
    predicted = {}
    if screened is not None and not screened.error:
        predicted = {name: screened.predicted_by(operators.injection(context, name)) for name in present}
    injected = over.answer(results, operators.injection(context, GROUP)) if GROUP in present else None
    measured = injected is not None and not injected.error
    return GateNumbers(
        samples=context.names,
        noise=repr(context.settings.perturbation),
        seeds=context.settings.seeds,
        metric=context.metric,
        chance=context.chance,
        predicted_kl={name: _numbers(values) for name, values in predicted.items()},
        kl={GROUP: _numbers(injected.mean("kl"))} if injected is not None and measured else {},
        accuracy={name: _numbers(values) for name, values in _scores(context, results, present).items()},
        nonfinite=clean.nonfinite + (injected.nonfinite if injected is not None and measured else 0),
    )


def _scores(context: StudyContext, results: Results, present: list[str]) -> dict[str, Array]:
    """The metric of each sample, clean and under noise in each operator that was injected; a broken answer is 0."""
    injections = {CLEAN: None, **{name: operators.injection(context, name) for name in present}}
    answers = {name: context.answer(results, injection) for name, injection in injections.items()}
    return {
        name: np.nan_to_num(answer.values(context.metric), posinf=0.0, neginf=0.0).mean(0)
        for name, answer in answers.items()
        if answer is not None and not answer.error
    }


def _numbers(values: Array) -> tuple[float | None, ...]:
    """As JSON has them: None for what is not finite."""
    return tuple(float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values)
