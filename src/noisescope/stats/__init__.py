"""Numbers with intervals: what a run has shown, and what it could have seen. numpy and scipy, no torch."""

from noisescope.stats.correlation import Correlation, Influence, correlation, influence
from noisescope.stats.intervals import (
    degradation,
    degradation_excess,
    degradation_ratio,
    difference,
    mean,
    measurable,
    noise_tolerance,
    retention,
    share,
)
from noisescope.stats.multiple_comparisons import (
    SELECTED,
    Picked,
    holm,
    p_no_difference,
    picked,
    simultaneous_level,
    smallest_detectable,
)
from noisescope.stats.samples import NOT_MEASURABLE, UNBOUNDED, Estimate
from noisescope.stats.typical import Shift, median, nonnegative_mean, trimmed_shift, typical, typical_ratio

__all__ = [
    "NOT_MEASURABLE",
    "SELECTED",
    "UNBOUNDED",
    "Correlation",
    "Estimate",
    "Influence",
    "Picked",
    "Shift",
    "correlation",
    "degradation",
    "degradation_excess",
    "degradation_ratio",
    "difference",
    "holm",
    "influence",
    "mean",
    "measurable",
    "median",
    "noise_tolerance",
    "nonnegative_mean",
    "p_no_difference",
    "picked",
    "retention",
    "share",
    "simultaneous_level",
    "smallest_detectable",
    "trimmed_shift",
    "typical",
    "typical_ratio",
]
