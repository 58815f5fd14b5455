"""Several checks as one verdict: the one rule for gates, comparisons, fault tests and locators."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.errors import unknown

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
VERDICTS = (PASS, FAIL, UNDECIDED)
EXIT_CODES = {PASS: 0, FAIL: 1, UNDECIDED: 3}
_WORDS = {PASS: "passed", FAIL: "failed", UNDECIDED: "undecided"}


def overall(verdicts: Iterable[str]) -> str:
    """Fails where one check fails; undecided only where no check decides; else passes."""
    found = set(verdicts)
    for verdict in found - set(VERDICTS):
        raise unknown("verdict", verdict, VERDICTS)
    if FAIL in found:
        return FAIL
    return UNDECIDED if found == {UNDECIDED} else PASS


def headline(verdict: str, rows: Iterable[str]) -> str:
    """ "passed; 3 of 12 checks undecided": a verdict never hides what could not be decided."""
    found = list(rows)
    counts = {kind: found.count(kind) for kind in (FAIL, UNDECIDED)}
    parts = [f"{count} of {len(found)} checks {_WORDS[kind]}" for kind, count in counts.items() if count]
    return "; ".join([_WORDS[verdict], *parts])


def exit_code(verdict: str, *, allow_undecided: bool) -> int:
    """0 passed, 1 failed, 3 undecided, which `allow_undecided` makes 0."""
    return 0 if verdict == UNDECIDED and allow_undecided else EXIT_CODES[verdict]
