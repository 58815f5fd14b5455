"""A fault looked for, also one that is put in first."""

from __future__ import annotations

from noisescope.faults import faulty, parse_fault
from noisescope.locators.locate import locate
from noisescope.locators.verdict import Verdict
from noisescope.model import Subject
from noisescope.options.comparing import LocateOptions
from noisescope.sites import Place


def checked_fault(text: str | None) -> None:
    """Refuse a fault that can't be simulated, before a model is loaded."""
    if text is not None:
        parse_fault(text)


def locate_simulated(subject: Subject, asked: LocateOptions) -> tuple[Verdict, Place, int]:
    """The verdict while the fault of `simulate` is in the model, its place, and how many elements it changed."""
    fault, where = parse_fault(str(asked.simulate))
    with faulty(subject.model, fault, where, anatomy=subject.anatomy) as scope:
        verdict = locate(subject, options=asked)
    return verdict, where.place, scope.changed
