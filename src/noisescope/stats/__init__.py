"""Numbers with intervals: what a run has shown, and what it could have seen. numpy and scipy, no torch."""

from noisescope.stats.estimate import NOT_MEASURABLE, UNBOUNDED, Estimate
from noisescope.stats.intervals import (
    degradation,
    difference,
    mean,
    measurable,
    noise_tolerance,
    ratio,
    retention,
)
from noisescope.stats.looks import holm, p_no_difference, simultaneous_level, smallest_detectable
from noisescope.stats.nonnegative import nonnegative_mean
from noisescope.stats.quantiles import median, quantile, typical_ratio
from noisescope.stats.ranks import Correlation, correlation, split_half_agreement
from noisescope.stats.selection import Picked, picked, picked_median
from noisescope.stats.trimmed import Shift, trimmed_shift

__all__ = [
    "NOT_MEASURABLE",
    "UNBOUNDED",
    "Correlation",
    "Estimate",
    "Picked",
    "Shift",
    "correlation",
    "degradation",
    "difference",
    "holm",
    "mean",
    "measurable",
    "median",
    "noise_tolerance",
    "nonnegative_mean",
    "p_no_difference",
    "picked",
    "picked_median",
    "quantile",
    "ratio",
    "retention",
    "simultaneous_level",
    "smallest_detectable",
    "split_half_agreement",
    "trimmed_shift",
    "typical_ratio",
]
