"""Level 1: which kinds of operation are sensitive to noise."""

from __future__ import annotations

from noisescope.diagnosis.context import Frame, present_operators
from noisescope.diagnosis.effects import correct_looks, effect, on_one_scale, prediction_scale
from noisescope.diagnosis.rows import Effect
from noisescope.diagnosis.screen import Screened
from noisescope.injection import Injection
from noisescope.trials import Results, Trial


def injection(frame: Frame, operator: str) -> Injection:
    """Noise on one operator, wherever the model computes it."""
    return frame.injection(operators=frozenset({operator}))


def propose(frame: Frame, results: Results) -> list[Trial]:
    if frame.settings.effort == "screen":
        return []
    return [trial for operator in present_operators(frame) for trial in frame.ask(injection(frame, operator))]


def conclude(frame: Frame, results: Results, screened: Screened | None) -> dict[str, Effect]:
    """A row for every operator asked for; one that the model lacks is a row "absent"."""
    present = present_operators(frame)
    rows = [
        effect(frame, results, injection(frame, operator), screened, looks=len(present))
        if operator in present and not _never_computed(frame, results, operator)
        else Effect(evidence="absent", metric=frame.metric_name)
        for operator in frame.settings.operators
    ]
    rows = on_one_scale(correct_looks(rows), prediction_scale(rows))
    return dict(zip(frame.settings.operators, rows, strict=True))


def _never_computed(frame: Frame, results: Results, operator: str) -> bool:
    """Whether an operator that the model may or may not have turned out to be absent."""
    answer = frame.answer(results, injection(frame, operator)) if operator in frame.doubtful else None
    return answer is not None and answer.injected_nothing
