"""Level 1: which kinds of operation are sensitive to noise."""

from __future__ import annotations

from noisescope.diagnosis.context import StudyContext, present_operators
from noisescope.diagnosis.effects import correct_looks, effect, on_one_scale, prediction_scale
from noisescope.diagnosis.rows import Effect
from noisescope.diagnosis.screen import Screened
from noisescope.injection import Injection
from noisescope.trials import Results, Trial


def injection(context: StudyContext, operator: str) -> Injection:
    """Noise on one operator, wherever the model computes it."""
    return context.injection(operators=frozenset({operator}))


def propose(context: StudyContext, results: Results) -> list[Trial]:
    if context.settings.effort == "screen":
        return []
    return [trial for operator in present_operators(context) for trial in context.ask(injection(context, operator))]


def conclude(context: StudyContext, results: Results, screened: Screened | None) -> dict[str, Effect]:
    """A row for every operator asked for; one that the model lacks is a row "absent"."""
    present = present_operators(context)
    rows = [
        effect(context, results, injection(context, operator), screened, looks=len(present))
        if operator in present and not _never_computed(context, results, operator)
        else Effect(evidence="absent", metric=context.metric_name)
        for operator in context.settings.operators
    ]
    rows = on_one_scale(correct_looks(rows), prediction_scale(rows))
    return dict(zip(context.settings.operators, rows, strict=True))


def _never_computed(context: StudyContext, results: Results, operator: str) -> bool:
    """Whether an operator that the model may or may not have turned out to be absent."""
    answer = context.answer(results, injection(context, operator)) if operator in context.doubtful else None
    return answer is not None and answer.injected_nothing
