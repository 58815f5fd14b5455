"""Level 1: which kinds of operation are sensitive to noise."""

from __future__ import annotations

from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.effects import StudyResults, correct_for_comparisons, on_one_scale, prediction_scale
from noisescope.diagnosis.predicted_kl import Screened
from noisescope.diagnosis.rows import Effect
from noisescope.injection import Injection
from noisescope.trials import Results, Trial


def injection(context: StudyContext, operator: str) -> Injection:
    """Noise in one operator, wherever the model computes it."""
    return context.injection(operators=frozenset({operator}))


def propose(context: StudyContext, results: Results) -> list[Trial]:
    if context.settings.effort == "screen":
        return []
    return [trial for operator in context.present_operators for trial in context.ask(injection(context, operator))]


def conclude(context: StudyContext, results: Results, screened: Screened | None) -> dict[str, Effect]:
    """A row for every requested operator; one that the model lacks is a row "absent"."""
    study, present = StudyResults(context, results, screened), context.present_operators
    rows = []
    for operator in context.settings.operators:
        answer = study.answer(injection(context, operator)) if operator in context.uncertain_operators else None
        if operator not in present or (answer is not None and answer.injected_nothing):
            rows.append(Effect(evidence="absent", metric=context.metric_name))
        else:
            rows.append(study.effect(injection(context, operator), comparisons=len(present)))
    rows = on_one_scale(correct_for_comparisons(rows), prediction_scale(rows))
    return dict(zip(context.settings.operators, rows, strict=True))
