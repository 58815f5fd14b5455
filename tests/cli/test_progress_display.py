"""How progress is shown: phases by name, a total that does not change, an estimate; how a command ends on Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from noisescope import progress
from noisescope.cli import progress_display
from noisescope.cli.command_builder import carry_out
from noisescope.cli.progress_display import ProgressDisplay, duration
from noisescope.options.device_commands import RecordOptions
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.progress import Phase


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shown() -> tuple[ProgressDisplay, Clock]:
    clock = Clock()
    return ProgressDisplay(clock=clock), clock


def test_phases_have_names_and_the_total_stays(shown: tuple[ProgressDisplay, Clock]) -> None:
    """The step at hand, the share of all work, and the time left by the speed so far."""
    display, clock = shown
    display.planned([Phase("screen", 1, work=10.0), Phase("operators", 3, work=30.0)])
    display.begun("screen", 1)
    clock.now += 5
    assert display.line() == "screen (0 %, 5 s so far)"
    display.stepped("screen", None)
    display.begun("operators", 1)
    assert display.line() == "operators 1 of 3 (25 %, about 15 s left)"
    display.stepped("operators", 10.0)
    assert display.line() == "operators 2 of 3 (50 %, about 5 s left)"
    for _ in range(5):  # more than were planned
        display.stepped("operators", 10.0)
    assert display.step_text == "operators 3 of 3" and display.share == 1.0 and display.total == 40.0
    display.begun("a phase nobody planned", 1)
    assert display.total == 40.0 and display.step_text == "a phase nobody planned"


def test_lines_come_now_and_then(shown: tuple[ProgressDisplay, Clock], capsys: pytest.CaptureFixture[str]) -> None:
    """None in the first three seconds, then every ten; also while one step takes long."""
    display, clock = shown
    display.begun("loading", 1)
    for second in range(25):
        clock.now = 100.0 + second
        display.tick()
    assert capsys.readouterr().err.splitlines() == [
        "loading (3 s so far)",
        "loading (13 s so far)",
        "loading (23 s so far)",
    ]


def test_verbose_says_what_each_phase_took(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = ProgressDisplay(verbose=True, clock=clock)
    display.planned([Phase("folds", 2)])
    display.stepped("folds", None)
    clock.now += 2
    display.ended()
    assert capsys.readouterr().err == "folds: 2.0 s, 1 of 2 done\n"


def test_a_bar_on_a_terminal_makes_room_for_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar is hidden while text is printed, and gone at the end."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ProgressDisplay() as display:
        display.planned([Phase("operators", 2)])
        display.stepped("operators", None)
        assert display._bar is not None
        progress_display.say("a line", err=True)
        assert display._bar is None
        display.stepped("operators", None)
        assert display._bar is not None
    assert display._bar is None and "a line" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "words"), [(4.4, "4 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def _interrupted(options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda here: DiagnoseOptions(output=here), "What was measured is kept: noisescope runs resume "),
        (lambda here: DiagnoseOptions(), "Nothing was kept: with -o DIR the same command can be resumed"),
        (lambda here: DiagnoseOptions(output=here / "new"), "Nothing was kept: run the same command again"),
        (lambda here: RecordOptions(output=here / "new"), "Nothing was kept: run the same command again"),
    ],
)
def test_ctrl_c_says_how_to_go_on(
    make: Callable[[Path], Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 130, in every command."""
    (tmp_path / "run.sqlite").touch()
    with pytest.raises(typer.Exit) as ended:
        carry_out(_interrupted, make(tmp_path))
    assert ended.value.exit_code == 130
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith(f"interrupted. {words}")


def test_quiet_commands_have_no_listener() -> None:
    """With -q nothing is planned, counted or shown; without it somebody listens."""
    found = []
    carry_out(lambda options: found.append(progress.heard()), DiagnoseOptions(quiet=True))
    carry_out(lambda options: found.append(progress.heard()), DiagnoseOptions())
    assert found == [False, True]


def test_the_time_left_falls_while_a_step_runs(shown: tuple[ProgressDisplay, Clock]) -> None:
    """A step that takes longer than its share leaves what comes after it; the last one then says no time at all."""
    display, clock = shown
    display.planned([Phase("screen", 1, work=10.0), Phase("operators", 2, work=30.0)])
    clock.now += 10
    display.stepped("screen", None)
    display.begun("operators", 2)
    clock.now += 10
    assert display.line() == "operators 1 of 2 (25 %, about 20 s left)"
    clock.now += 30
    assert display.line() == "operators 1 of 2 (25 %, about 30 s left)"  # 50 s for 25 of 40, and as fast for 15 more
    display.stepped("operators", 15.0)
    clock.now += 100
    assert display.line() == "operators 2 of 2 (62 %, 2 min so far)"


def test_a_long_step_advances_by_its_parts(shown: tuple[ProgressDisplay, Clock]) -> None:
    """They count as their share of the step, for the percentage and the time left; what was shown never falls."""
    display, clock = shown
    display.planned([Phase("screen", 1, work=10.0), Phase("curvature", 2, work=30.0)])
    display.stepped("screen", None)
    display.begun("curvature", 1)
    clock.now += 10
    display.advanced(0.5)
    assert display.line() == "curvature 1 of 2 (44 %, about 13 s left)"
    clock.now += 5
    assert display.line() == "curvature 1 of 2 (44 %, about 9 s left)"  # as 15 s for 25 of 40 leave
    display.advanced(1.0)
    assert display.share == 25 / 40
    display.stepped("curvature", 5.0)  # a step of less work than most
    assert display.share == 25 / 40
    display.advanced(0.5)
    assert display.share == 25 / 40
    display.stepped("curvature", None)
    assert display.share == 1.0
