"""What long work reports of itself, and who hears it."""

from __future__ import annotations

from collections.abc import Sequence

from noisescope import progress
from noisescope.progress import Phase


class Heard:
    """A listener that keeps all it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def planned(self, phases: Sequence[Phase]) -> None:
        self.events.append(("plan", *((phase.name, phase.steps, phase.total) for phase in phases)))

    def begun(self, name: str, steps: int) -> None:
        self.events.append(("begin", name, steps))

    def stepped(self, name: str, work: float | None) -> None:
        self.events.append(("step", name, work))

    def advanced(self, share: float) -> None:
        self.events.append(("part", share))

    def ended(self) -> None:
        self.events.append(("end",))


def test_a_plan_and_its_steps_are_heard() -> None:
    """The plan first, with the work of each phase; then every step; a phase without steps is no phase."""
    heard = Heard()
    with progress.shown_by(heard):
        with progress.plan(Phase("folds", 2), Phase("samples", 1, work=8.0), Phase("nothing", 0)):
            assert list(progress.track("folds", iter("ab"))) == ["a", "b"]
            progress.step("samples", 8.0)
        assert progress.heard()
    steps = [("begin", "folds", 2), ("step", "folds", None), ("step", "folds", None), ("step", "samples", 8.0)]
    assert heard.events == [("plan", ("folds", 2, 2.0), ("samples", 1, 8.0)), *steps, ("end",)]


def test_a_long_step_reports_its_parts() -> None:
    """Each with the share of the step that is done."""
    heard = Heard()
    with progress.shown_by(heard):
        assert list(progress.parts("abcd")) == ["a", "b", "c", "d"]
    assert heard.events == [("part", 0.25), ("part", 0.5), ("part", 0.75), ("part", 1.0)]


def test_a_plan_inside_another_changes_no_total() -> None:
    """Its phases are named; the outer plan stays the whole, also after an error inside."""
    heard = Heard()
    with progress.shown_by(heard), progress.plan(Phase("outer", 3)), progress.plan(Phase("inner", 9)):
        progress.begin("inner", 9)
    assert [event[0] for event in heard.events] == ["plan", "begin", "end"]


def test_nobody_listens_unless_asked() -> None:
    """Nothing is heard outside, nor where a listener is silenced."""
    heard = Heard()
    with progress.shown_by(heard), progress.shown_by(None):
        assert not progress.heard()
        assert list(progress.track("x", [1])) == [1]
    assert not heard.events and not progress.heard()
