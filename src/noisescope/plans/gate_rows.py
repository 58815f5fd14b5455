"""The decisions of a gate as values: one row per check, and the result with its verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from noisescope.diagnosis.gate_baseline import CLEAN
from noisescope.findings import percent
from noisescope.findings.finding import counted, span
from noisescope.findings.pass_fail import FAIL, UNDECIDED, Verdict, headline
from noisescope.jsonform import ADDED
from noisescope.stats import Estimate
from noisescope.tables import Sheet, Table, Tabular

SCHEMA_VERSION = 2  # 2: rows are typed, and an undecided row no longer hides behind those that pass
Measure = Literal["predicted_kl", "kl"]


@dataclass(frozen=True)
class GateRow:
    """One check."""

    name: str
    verdict: Verdict
    message: str


@dataclass(frozen=True)
class Difference:
    """A condition that differs between the two sides."""

    what: str
    baseline: str | int
    candidate: str | int


@dataclass(frozen=True)
class ConditionsRow(GateRow):
    """The conditions of both measurements: passed if equal, undecided if not."""

    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class DivergenceRow(GateRow):
    """How far noise in an operator moves the output, over the baseline's; `baseline` and `candidate` are medians.

    `smallest_detectable` is the ratio that would have been found with a probability of 80 %.
    """

    measure: Measure
    operator: str
    left_out: int
    baseline: float | None
    candidate: float | None
    ratio: Estimate
    smallest_detectable: float | None


@dataclass(frozen=True)
class LimitRow(GateRow):
    """What noise in an operator costs, as a share of the score, against the limit."""

    operator: str
    degradation: Estimate
    limit: float


@dataclass(frozen=True)
class ScoreRow(GateRow):
    """The score without noise against the baseline's; `limit` is the share of it that may be lost."""

    limit: float


@dataclass(frozen=True)
class ScoreChange:
    """The score on both sides with the smallest detectable drop; it decides nothing by itself."""

    under_noise_in: str
    baseline: Estimate
    candidate: Estimate
    difference: Estimate
    smallest_detectable: float | None
    metric: str = field(default="accuracy", metadata=ADDED)

    @property
    def _is_share(self) -> bool:
        return self.metric != "perplexity"  # whose inverse is far below a percent

    def score(self, value: float) -> str:
        return percent(value) if self._is_share else f"{value:.3g}"

    def points(self, value: float, sign: str = "+") -> str:
        """A difference of scores."""
        return f"{100 * value:{sign}.1f} points" if self._is_share else f"{value:{sign}.2g}"

    @property
    def change(self) -> str:
        if self.difference.value is None:
            return "..."
        digits, scale = ("+.1f", 100) if self._is_share else ("+.2g", 1)
        return f"{self.points(self.difference.value)} {span(self.difference, digits, scale)}"

    @property
    def power(self) -> str:
        return (
            "no drop" if self.smallest_detectable is None else f"a drop of {self.points(self.smallest_detectable, '')}"
        )


@dataclass(frozen=True)
class SampleCounts:
    """How many samples each side has, and how many of them are compared in pairs (0: other samples)."""

    baseline: int
    candidate: int
    pairs: int

    def __str__(self) -> str:
        before, now = self.baseline, self.candidate
        if not self.pairs:
            return f"{counted(now, 'other sample')} than the baseline's {before}"
        words = f"{counted(self.pairs, 'sample')} in pairs"
        return words if before == now else f"{words}, of {before} before and {now} now"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Every row of a gate, and the verdict that follows from them."""

    verdict: Verdict
    worse_than: float
    max_degradation_allowed: float
    max_degradation: float | None
    worst: DivergenceRow
    paired: bool
    n: SampleCounts
    divergence: tuple[DivergenceRow, ...]
    limits: tuple[LimitRow, ...]
    finite: GateRow
    clean_score: ScoreRow
    accuracy: tuple[ScoreChange, ...]

    @property
    def accuracy_under_noise(self) -> tuple[ScoreChange, ...]:
        """Without the clean score, which has its own check."""
        return tuple(change for change in self.accuracy if change.under_noise_in != CLEAN)

    @property
    def compared(self) -> tuple[GateRow, ...]:
        """The rows that compare the model with its baseline or a limit: those that the headline counts."""
        return (*self.divergence, *self.limits, self.clean_score)

    @property
    def checks(self) -> tuple[GateRow, ...]:
        return (*self.compared, self.finite)


@dataclass(frozen=True)
class GateBaseline:
    model: str
    finished: str


@dataclass(frozen=True, kw_only=True)
class GateResult(Decision, Tabular):
    """A decision with what was compared, when, and under which conditions."""

    schema_version: int = SCHEMA_VERSION
    headline: str
    model: str
    baseline: GateBaseline
    step: int | None
    finished: str
    seconds: float
    conditions: ConditionsRow

    @property
    def checks(self) -> tuple[GateRow, ...]:
        return (self.conditions, *super().checks)

    @property
    def failed(self) -> bool:
        return self.verdict == FAIL

    def sheet(self) -> Sheet:
        tables = {
            "checks": Table.of(GateRow, self.checks),
            "divergence": Table.of(DivergenceRow, self.divergence),
            "limits": Table.of(LimitRow, self.limits),
            "scores": Table.of(ScoreChange, self.accuracy),
        }
        heads = {"name": "check", "verdict": "verdict", "message": ""}
        title = f"{self.verdict}: {self.model} against {self.baseline.model}"
        tone = {FAIL: "critical", UNDECIDED: "moderate"}.get(self.verdict, "low")
        return Sheet(title, tables, heads, (f"{self.headline}.", f"{self.n}."), tone=tone)


def headline_of(decision: Decision, conditions: ConditionsRow) -> str:
    """The verdict as text, with how many of the comparisons failed or are undecided.

    Conditions and finite outputs are not numeric comparisons: they are mentioned if something is wrong with them.
    """
    verdicts = [row.verdict for row in decision.compared]
    words = headline(decision.verdict, verdicts)
    if decision.finite.verdict == FAIL:
        failed, undecided = verdicts.count(FAIL), verdicts.count(UNDECIDED)
        words = f"failed: outputs are not finite; {failed} of {len(verdicts)} checks failed, {undecided} undecided"
    return f"{words}; conditions differ from the baseline's" if conditions.differences else words
