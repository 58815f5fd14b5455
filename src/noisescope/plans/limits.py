"""A measured number against a limit: decided by its whole interval, or undecided."""

from __future__ import annotations

from noisescope.findings.verdicts import FAIL, PASS, UNDECIDED, Verdict
from noisescope.stats import Estimate


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
