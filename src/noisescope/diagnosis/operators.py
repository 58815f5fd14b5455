"""Level 1: which kinds of operation can't stand noise."""

from __future__ import annotations

from noisescope.diagnosis.effects import Row, correct_looks, effect
from noisescope.diagnosis.frame import Frame, present_operators
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


def conclude(frame: Frame, results: Results, screened: Screened | None) -> dict[str, Row]:
    """A row for every operator asked for; one that the model lacks is a row "absent"."""
    present = present_operators(frame)
    rows: dict[str, Row] = {}
    for operator in frame.settings.operators:
        if operator in present:
            row = effect(frame, results, injection(frame, operator), screened, looks=len(present))
            never = operator in frame.doubtful and row.get("error", "").startswith("NothingInjected")
            rows[operator] = {"evidence": "absent"} if never else row
        else:
            rows[operator] = {"evidence": "absent"}
    correct_looks(list(rows.values()))
    return rows
