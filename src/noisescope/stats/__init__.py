"""Numbers with intervals: what a run has shown, and what it could have seen. numpy and scipy, no torch."""

from noisescope.stats.estimate import NOT_MEASURABLE, UNBOUNDED, Estimate
from noisescope.stats.intervals import (
    degradation,
    difference,
    mean,
    measurable,
    noise_tolerance,
    retention,
    share,
)
from noisescope.stats.looks import holm, p_no_difference, simultaneous_level, smallest_detectable
from noisescope.stats.nonnegative import nonnegative_mean
from noisescope.stats.quantiles import median, typical_ratio
from noisescope.stats.ranks import Correlation, Influence, correlation, influence
from noisescope.stats.ratios import degradation_excess, degradation_ratio
from noisescope.stats.selection import SELECTED, Picked, picked
from noisescope.stats.trimmed import Shift, trimmed_shift, typical

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
