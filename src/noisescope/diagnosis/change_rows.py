"""The rows of a comparison of two stored runs. Field names are the keys of comparison.json (jsonform.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from noisescope.diagnosis.effects import NOTHING
from noisescope.diagnosis.report import SCHEMA_VERSION, Asked
from noisescope.diagnosis.rows import SIGNIFICANT
from noisescope.diagnosis.stored_trials import CLEAN
from noisescope.jsonform import Json
from noisescope.stats import Estimate

UNCHANGED: Final = "no significant difference"
LOWER_IS_BETTER = ("kl", "nll")
Change = Literal["worse", "better", "no significant difference", "not measurable"]
VerdictWord = Literal["worse", "better", "mixed", "no significant difference", "undecided"]


@dataclass(frozen=True)
class SeedCounts:
    """How many seeds of the noise each run has for an injection, and how many of them are the same."""

    a: int
    b: int
    common: int


@dataclass(frozen=True, kw_only=True)
class ChangeRow:
    """One metric under one injection in both runs. Differences are B less A.

    `a`, `b` and `difference` are of the median over samples for KL, whose mean a few samples decide, and of the mean
    for every other metric: `statistic` says which. `operators` None means every operator; `layers` and `places` are
    empty where the noise falls everywhere. `order` is along the model. `seeds` is None for the clean model, p where
    nothing could be measured, `smallest_detectable` where no difference could have been found.
    """

    label: str = CLEAN
    target: str = CLEAN
    noise: str = ""
    operators: tuple[str, ...] | None = None
    layers: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    order: int
    metric: str
    statistic: Literal["mean", "median"]
    paired: bool
    left_out: int
    seeds: SeedCounts | None = None
    a: Estimate = NOTHING
    b: Estimate = NOTHING
    difference: Estimate = NOTHING
    identical: bool = False
    p: float | None = None
    p_corrected: float | None = None
    smallest_detectable: float | None = None
    verdict: Change = "not measurable"

    @property
    def clean(self) -> bool:
        """Whether this row is of the clean models."""
        return not self.noise

    @property
    def significant(self) -> bool:
        """Whether the difference is significant after correction for all rows; p = 0 is as certain as possible."""
        return self.p_corrected is not None and self.p_corrected < SIGNIFICANT

    @property
    def changed(self) -> bool:
        return self.verdict in ("worse", "better")


@dataclass(frozen=True)
class ChangeCounts:
    """Rows of one metric. `undecided` could not be measured."""

    worse: int
    better: int
    undecided: int
    comparisons: int


@dataclass(frozen=True)
class ChangeVerdict:
    """All rows in one word: "undecided" only if no row could be measured."""

    word: VerdictWord
    worse: int
    better: int
    undecided: int
    comparisons: int
    metrics: Mapping[str, ChangeCounts]


@dataclass(frozen=True, kw_only=True)
class RunFacts(Asked):
    """A run: its folder, its question, and its number of trials."""

    name: str
    trials: int
    failed: int


@dataclass(frozen=True)
class AskedDifferently:
    """A setting by its dotted name, with the value in each run."""

    what: str
    a: Json
    b: Json


@dataclass(frozen=True)
class FailedInjection:
    """An injection that failed in one run or in both, with the errors."""

    label: str
    a: str
    b: str


@dataclass(frozen=True)
class RunChanges:
    """Everything that the comparison of two runs shows."""

    a: RunFacts
    b: RunFacts
    differs: tuple[AskedDifferently, ...]
    metric: str
    verdict: ChangeVerdict
    rows: tuple[ChangeRow, ...]
    failed: tuple[FailedInjection, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ComparedRuns:
    """comparison.json."""

    schema_version: int = SCHEMA_VERSION
    comparison: RunChanges
