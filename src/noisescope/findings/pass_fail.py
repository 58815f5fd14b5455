"""Verdicts of checks: a number against a limit, the one rule for many checks, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from noisescope.estimate import Estimate

Verdict = Literal["pass", "fail", "undecided"]
PASS: Final = "pass"
FAIL: Final = "fail"
UNDECIDED: Final = "undecided"
VERDICTS: tuple[Verdict, ...] = (PASS, FAIL, UNDECIDED)


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Fail where a check fails, else pass where one passes; undecided only where no check decides.

    >>> overall(["pass", "undecided"]), overall(["undecided", "fail"]), overall(["undecided"]), overall([])
    ('pass', 'fail', 'undecided', 'undecided')
    """
    if FAIL in verdicts:
        return FAIL
    return PASS if PASS in verdicts else UNDECIDED


def headline(verdict: Verdict, verdicts: Sequence[Verdict]) -> str:
    """The verdict in words, with the number of checks that failed or are undecided.

    >>> headline("pass", ["pass", "pass", "undecided"]), headline("fail", ["fail", "pass"])
    ('passed; 1 of 3 checks undecided', 'failed: 1 of 2 checks')
    """
    count, failed, open_ = len(verdicts), verdicts.count(FAIL), verdicts.count(UNDECIDED)
    words = {PASS: "passed", FAIL: f"failed: {failed} of {count} checks", UNDECIDED: "undecided"}[verdict]
    return f"{words}; {open_} of {count} checks undecided" if open_ else words


def exit_code(verdict: Verdict, *, allow_undecided: bool) -> int:
    """0 passed, 1 failed, 3 undecided, or 0 with `allow_undecided`."""
    return {PASS: 0, FAIL: 1, UNDECIDED: 0 if allow_undecided else 3}[verdict]


def at_most(estimate: Estimate, limit: float) -> Verdict:
    """Pass where the whole interval lies at or below a limit, fail where it lies above.

    >>> at_most(Estimate(0.2, 0.1, 0.3, 50), 0.25), at_most(Estimate(0.2, 0.1, 0.25, 50), 0.25)
    ('undecided', 'pass')
    """
    if estimate.above(limit):
        return FAIL
    return PASS if estimate.high is not None and estimate.high <= limit else UNDECIDED


def at_least(estimate: Estimate, limit: float) -> Verdict:
    """Pass where the whole interval lies at or above a limit, fail where it lies below."""
    if estimate.below(limit):
        return FAIL
    return PASS if estimate.low is not None and estimate.low >= limit else UNDECIDED
