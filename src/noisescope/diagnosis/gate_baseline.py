"""The numbers a gate compares: how far noise moves the output over every token of a sample, one per sample.

A score depends on the answer alone. That is often a token or two, and what noise does to them differs from sample to
sample by orders of magnitude: on the bundled model the log of a sample's KL has a standard deviation of 2.2 (predicted,
noise in all products) to 3.4 (injected, one seed), so that two sets of 50 samples distinguish a factor of three, at
best. Over every token of a sample it is 0.2 to 0.6, and they distinguish a factor of 1.2. `diagnose` keeps these
numbers in its report, and a later gate measures the same of another model.
"""

from __future__ import annotations

import math

import numpy as np

from noisescope.diagnosis import operators, predicted_kl
from noisescope.diagnosis.context import GROUP, Array, StudyContext
from noisescope.diagnosis.section_types import GateNumbers
from noisescope.trials import Results, Trial

OPERATORS = (GROUP, "softmax", "silu", "gelu", "norm")  # those of the original method notes, products as one
CLEAN = "clean"
DIGITS = 6


def propose(context: StudyContext, results: Results) -> list[Trial]:
    """The screen over all tokens; and where noise is injected at all, that in all products, over all and scored."""
    if not context.all_token_slices or context.settings.question is not None:
        return []
    over, products = context.scoring_all_tokens, operators.injection(context, GROUP)
    trials = context.ask(None) + over.ask(None) + predicted_kl.propose(over, results)
    if context.settings.effort != "screen" and GROUP in context.present:
        trials += over.ask(products) + context.ask(products)
    return trials


def conclude(context: StudyContext, results: Results) -> GateNumbers | None:
    """Numbers by operator and sample; None where nothing was asked, or the model itself failed."""
    if context.settings.question is not None:
        return None  # a gate repeats noise
    over = context.scoring_all_tokens
    clean = over.answer(results, None) if context.all_token_slices else None
    if clean is None or clean.error:
        return None
    screened = predicted_kl.conclude(over, results)
    injections = {name: operators.injection(context, name) for name in OPERATORS if name in context.present}
    injected = over.answer(results, injections[GROUP]) if GROUP in injections else None
    injected = None if injected is None or injected.error else injected
    scored = {name: context.answer(results, one) for name, one in {CLEAN: None, **injections}.items()}
    return GateNumbers(
        samples=context.sample_hashes,
        noise=repr(context.settings.perturbation),
        seeds=context.settings.seeds,
        metric=context.metric,
        chance=context.chance,
        predicted_kl={}
        if screened is None or screened.error
        else {name: _numbers(screened.predicted_by(one)) for name, one in injections.items()},
        kl={} if injected is None else {GROUP: _numbers(injected.mean("kl"))},
        accuracy={
            name: _numbers(np.nan_to_num(answer.values(context.metric), posinf=0.0, neginf=0.0).mean(0))
            for name, answer in scored.items()  # a broken answer scores 0
            if answer is not None and not answer.error
        },
        nonfinite=clean.nonfinite + (0 if injected is None else injected.nonfinite),
    )


def _numbers(values: Array) -> tuple[float | None, ...]:
    """As JSON has them: None for what is not finite."""
    return tuple(float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values)
