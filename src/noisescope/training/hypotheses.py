"""What the experiment of phases shows: criteria as regions, estimates over seeds x problems, verdicts. No torch.

A criterion names a quantity and the region it must lie in. With an interval that holds for all criteria together, a
criterion is *supported* where the interval lies inside the region, *refuted* where it lies outside, and *not decidable
with this n* where it crosses the edge; then follows how many seeds (and problems) would decide, were the estimate true.

Trainings and problems are two random samples, crossed: every trained model of an arm answers the same problems. With
d[s, i] the value of seed s on problem i,

    Var(mean d) = (MS_seed + max(MS_problem - MS_rest, 0)) / (S N),

the mean squares of a two-way table, with Satterthwaite's degrees of freedom. A ratio of means (retention) enters by its
linearisation, (y - R x) / mean(x).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from noisescope import stats
from noisescope.stats import Estimate

Array = NDArray[np.float64]
SUPPORTED, REFUTED, UNDECIDED = "supported", "refuted", "not decidable with this n"
MOST_SEEDS = 1000  # beyond that, "how many would decide" is of no use
CHANCE = 0.01  # answers are numbers from 0 to 99
SECOND_HALF = 0.5  # of a run: where its stability is looked at


@dataclass(frozen=True)
class Outcome:
    """One trained model: answers by level as [problems, noise seeds], and the curve of its training."""

    answers: Mapping[float, Array]
    curve: Sequence[Mapping[str, Any]]
    injections: Mapping[str, int]

    def log_mean(self, name: str) -> float:
        """The mean of the log of a curve over the second half; NaN where the run diverged."""
        half = [point[name] for point in self.curve if point["step"] > SECOND_HALF * self.curve[-1]["step"]]
        if any(value is None or not math.isfinite(value) or value <= 0 for value in half):
            return math.nan
        return float(np.mean(np.log(half)))

    @property
    def diverged(self) -> bool:
        """Not finite at some time, or worse on held-out problems in the end than at the first look."""
        values = [point["held_out"] for point in self.curve]
        if any(value is None or not math.isfinite(value) for value in values):
            return True
        return bool(values[-1] > max(values[0], 1.0))  # 1 nat a token: below that, a model that knew all may waver


Outcomes = Mapping[str, Mapping[int, Outcome]]  # arm -> seed


@dataclass(frozen=True)
class Criterion:
    """`quantity` of arm a less that of arm b (at a noise level) must lie between low and high."""

    name: str
    statement: str
    quantity: str  # "accuracy", "retention", "gradient_norm", "held_out" (the last two as logs)
    a: str
    b: str
    level: float = 0.0
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Spread:
    """A mean over seeds x problems with the two parts of its variance."""

    mean: float
    seeds: int
    problems: int
    of_seeds: float  # falls with 1 / seeds
    of_problems: float  # falls with 1 / problems
    smallest: float = 0.0  # variance of the mean where nothing changed: 0 is no honest error

    def half_width(self, level: float, seeds: int | None = None, times_problems: float = 1.0) -> float:
        """Half the interval, as it is or with more seeds and problems."""
        count = seeds or self.seeds
        a, b = self.of_seeds * self.seeds / count, self.of_problems / times_problems
        total = max(a + b, self.smallest / times_problems**2, 1e-300)
        apart = a**2 / (count - 1) + b**2 / max(self.problems - 1, 1)
        freedom = min(max((a + b) ** 2 / apart, 1.0), 1e6) if apart else 1e6
        return float(special.stdtrit(freedom, (1 + level) / 2)) * math.sqrt(total)


def crossed(values: Array) -> Spread:
    """The mean of values [seeds, problems], both random.

    Where all problems agree, one changed answer that was not met is allowed for: 1 / (N + 2), after Agresti and Min.
    """
    s, n = values.shape
    mean = float(values.mean())
    by_seed, by_problem = values.mean(axis=1), values.mean(axis=0)
    rest = values - by_seed[:, None] - by_problem[None, :] + mean
    ms_seed = n * float(np.var(by_seed, ddof=1)) if s > 1 else math.inf
    ms_problem = s * float(np.var(by_problem, ddof=1)) if n > 1 else 0.0
    ms_rest = float((rest**2).sum()) / max((s - 1) * (n - 1), 1)
    smallest = (n + 2) ** -2.0 if n > 1 else 0.0  # a single column holds no answers but one number a run
    return Spread(mean, s, n, ms_seed / (s * n), max(ms_problem - ms_rest, 0.0) / (s * n), smallest)


def spread_of(criterion: Criterion, outcomes: Outcomes) -> Spread | str:
    """The criterion's quantity over the seeds that both arms have, or why it can't be measured."""
    a, b = outcomes.get(criterion.a, {}), outcomes.get(criterion.b, {})
    seeds = sorted(set(a) & set(b))
    if len(seeds) < 2:
        return f"both arms are trained for {len(seeds)} of the seeds, and two are the least that show a spread"
    if criterion.quantity in ("accuracy", "retention"):
        learned = [_learned([arm[s] for s in seeds]) for arm in (a, b)]
        if not (all(learned) if criterion.quantity == "retention" else any(learned)):
            return f"{stats.NOT_MEASURABLE}: without noise the models answer no better than chance"
    if criterion.quantity == "accuracy":
        return crossed(np.stack([_accuracy(a[s], criterion.level) - _accuracy(b[s], criterion.level) for s in seeds]))
    if criterion.quantity == "retention":
        return crossed(
            retained([a[s] for s in seeds], criterion.level) - retained([b[s] for s in seeds], criterion.level)
        )
    logs = np.array([[a[s].log_mean(criterion.quantity) - b[s].log_mean(criterion.quantity)] for s in seeds])
    return crossed(logs) if np.isfinite(logs).all() else f"{stats.NOT_MEASURABLE}: a run diverged"


def _learned(runs: Sequence[Outcome]) -> bool:
    """Whether the clean accuracy stands clear of chance."""
    return stats.measurable(np.stack([_accuracy(run, 0.0) for run in runs]).mean(axis=0), CHANCE)


def retained(runs: Sequence[Outcome], level: float) -> Array:
    """accuracy(level) / accuracy(0) as values [seeds, problems]: their mean is the ratio, their spread its error."""
    clean = np.stack([_accuracy(run, 0.0) for run in runs])
    noisy = np.stack([_accuracy(run, level) for run in runs])
    ratio = noisy.mean() / clean.mean()
    linear: Array = ratio + (noisy - ratio * clean) / clean.mean()
    return linear


def judge(criteria: Sequence[Criterion], outcomes: Outcomes, *, level: float = 0.95) -> list[dict[str, Any]]:
    """A row for each criterion: the estimate, an interval that holds for all together, the verdict."""
    each = stats.simultaneous_level(len(criteria), level)
    return [_row(criterion, spread_of(criterion, outcomes), each) for criterion in criteria]


def _row(criterion: Criterion, spread: Spread | str, level: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": criterion.name,
        "statement": criterion.statement,
        "quantity": criterion.quantity,
        "arms": [criterion.a, criterion.b],
        "noise_level": criterion.level,
        "region": [end if math.isfinite(end) else None for end in (criterion.low, criterion.high)],
    }
    if isinstance(spread, str):
        nothing = Estimate(None, None, None, 0, level, spread)
        return {**row, "estimate": nothing.to_dict(), "seeds": 0, "verdict": UNDECIDED, "would_decide": None}
    half = spread.half_width(level)
    most = 1.0 if criterion.quantity == "accuracy" else math.inf  # a difference of shares is no larger
    low, high = max(spread.mean - half, -most), min(spread.mean + half, most)
    verdict = UNDECIDED
    if criterion.low <= low and high <= criterion.high:
        verdict = SUPPORTED
    elif high < criterion.low or low > criterion.high:
        verdict = REFUTED
    return {
        **row,
        "estimate": Estimate(spread.mean, low, high, spread.problems, level).to_dict(),
        "seeds": spread.seeds,
        "verdict": verdict,
        "would_decide": None if verdict != UNDECIDED else deciding(criterion, spread, level),
    }


def deciding(criterion: Criterion, spread: Spread, level: float) -> dict[str, int] | None:
    """The fewest seeds, and the fewest problems with them, that would decide if the estimate were the truth."""
    distance = min(abs(spread.mean - criterion.low), abs(spread.mean - criterion.high))
    for times in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
        for seeds in range(2, MOST_SEEDS + 1):
            if spread.half_width(level, seeds, times) <= distance:
                return {"seeds": seeds, "n": round(spread.problems * times)}
    return None


def estimate(values: Array, level: float = 0.95) -> dict[str, Any]:
    """The mean of values [seeds, problems] between 0 and 1 with its interval; without one for a single seed."""
    spread = crossed(values)
    if spread.seeds < 2:
        return Estimate(spread.mean, None, None, spread.problems, level, "one seed").to_dict()
    half = spread.half_width(level)
    low, high = max(spread.mean - half, 0.0), min(spread.mean + half, 1.0)
    return Estimate(spread.mean, low, high, spread.problems, level).to_dict()


def arm_row(name: str, runs: Mapping[int, Outcome], levels: Sequence[float]) -> dict[str, Any]:
    """An arm in numbers: accuracy and retention by level, stability of its training."""
    seeds = sorted(runs)
    every = [runs[seed] for seed in seeds]
    noisy = [level for level in levels if level and _learned(every)]
    return {
        "name": name,
        "seeds": seeds,
        "accuracy": {
            f"{level:g}": {
                **estimate(np.stack([_accuracy(run, level) for run in every])),
                "by_seed": [round(float(run.answers[level].mean()), 5) for run in every],
            }
            for level in levels
        },
        "retention": {f"{level:g}": estimate(retained(every, level)) for level in noisy},
        "training": {
            "diverged": sum(run.diverged for run in every),
            "gradient_norm": _geometric([run.log_mean("gradient_norm") for run in every]),
            "held_out_loss": _geometric([run.log_mean("held_out") for run in every]),
            "injections": {phase: sum(run.injections[phase] for run in every) for phase in ("forward", "backward")},
        },
    }


def _geometric(logs: Sequence[float]) -> float | None:
    return None if not all(map(math.isfinite, logs)) else round(math.exp(float(np.mean(logs))), 5)


def _accuracy(run: Outcome, level: float) -> Array:
    """[problems]: the share of noise seeds under which each was right."""
    shares: Array = run.answers[level].mean(axis=1)
    return shares
