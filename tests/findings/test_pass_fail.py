"""One rule for several checks, and one for exit codes."""

from __future__ import annotations

import pytest

from noisescope.findings.pass_fail import exit_code, headline, overall


@pytest.mark.parametrize(
    ("rows", "verdict", "words"),
    [
        (["pass", "pass"], "pass", "passed"),
        (["pass", "undecided", "undecided"], "pass", "passed; 2 of 3 checks undecided"),
        (["undecided", "undecided"], "undecided", "undecided; 2 of 2 checks undecided"),
        (["undecided", "fail", "pass"], "fail", "failed: 1 of 3 checks; 1 of 3 checks undecided"),
        ([], "undecided", "undecided"),
    ],
)
def test_one_rule(rows: list[str], verdict: str, words: str) -> None:
    """Undecided only where no row decides; undecided rows are counted."""
    assert overall(rows) == verdict and headline(verdict, rows) == words


def test_exit_codes() -> None:
    """0, 1 and 3; a failure is never allowed."""
    codes = {verdict: [exit_code(verdict, allow_undecided=allow) for allow in (False, True)]
             for verdict in ("pass", "fail", "undecided")}  # fmt: skip
    assert codes == {"pass": [0, 0], "fail": [1, 1], "undecided": [3, 0]}
