"""Verdicts of the phases experiment: criteria as regions, estimates over seeds x problems. Does not import torch.

A criterion names a quantity and the region it must lie in. With an interval that holds for all criteria together, a
criterion is *supported* where the interval lies inside the region, *refuted* where it lies outside, and *not decidable
with this n* where it crosses the edge; then follows how many seeds (and problems) would probably decide, were the
estimate true. Where the scale from 0 to 1 leaves only one verdict, it is *not measurable with this task*. A ratio of
means (retention) enters by its linearisation, (y - R x) / mean(x).

Trainings and problems are two random samples, crossed: every trained model of an arm answers the same problems. With
d[s, i] = mean + seed + problem + rest the value of seed s on problem i,

    Var(mean d) = v_seed / S + v_problem / N + v_rest / (S N)  =  a + b,
    a = MS_seed / (S N),  b = max(MS_problem - MS_rest, 0) / (S N),

by the mean squares of a two-way table (Searle, Casella, McCulloch, Variance Components, 1992, ch. 4). The interval is

    mean +- sqrt(t(S - 1)^2 a + t(N - 1)^2 b),

Banerjee's for a sum of independent means with unequal variances (Sankhya 22, 1960, 357-358): each part has its own
quantile, and it covers at least its level. Here b is a difference and only nearly such a part, so the tests simulate
the coverage. One quantile with Satterthwaite's degrees of freedom covers too little: an `a` that is small by chance, as
with two or three seeds, makes those large.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from noisescope import stats
from noisescope.reports.experiment import ArmAccuracy, ArmRow, ArmTraining, InjectionCounts, JudgedCriterion, Needed
from noisescope.stats import Estimate

Array = NDArray[np.float64]


SUPPORTED, REFUTED, UNDECIDED = "supported", "refuted", "not decidable with this n"
UNMEASURABLE = f"{stats.NOT_MEASURABLE} with this task"  # whatever the models do, one verdict comes out
POWER = 0.8  # the chance to decide that "how many would decide" is planned for
MOST_SEEDS = 1000  # beyond that, "how many would decide" is of no use
TEST_COST = 0.05  # of testing on the problems over that of a training: 0.5 % by default, 6 % by GRPO
CHANCE = 0.01  # answers are numbers from 0 to 99
SECOND_HALF = 0.5  # of a run: where its stability is looked at


@dataclass(frozen=True)
class CurvePoint:
    """Training at one step; None if a number was not finite."""

    step: int
    gradient_norm: float | None
    held_out: float | None


@dataclass(frozen=True)
class Outcome:
    """One trained model: answers by level as [problems, noise seeds], and the curve of its training."""

    answers: Mapping[float, Array]
    curve: Sequence[CurvePoint]
    injections: Mapping[str, int]
    same: Mapping[float, Array] = field(default_factory=dict)  # answers under the training's own noise
    epochs: Sequence[Mapping[float, Array]] = ()  # answers after the epochs before the last

    def log_mean(self, quantity: str) -> float:
        """The mean of the log of a curve over the second half; NaN where the run diverged, -inf where it met a 0."""
        half = [point for point in self.curve if point.step > SECOND_HALF * self.curve[-1].step]
        values = _finite([point.gradient_norm if quantity == "gradient_norm" else point.held_out for point in half])
        if values is None:
            return math.nan
        if min(values) <= 0:  # gradients of GRPO, where all answers of every group since the last point agreed
            return -math.inf
        return float(np.mean(np.log(values)))

    @property
    def diverged(self) -> bool:
        """Not finite at some point, or worse on held-out problems at the end than at the first point."""
        values = _finite([point.held_out for point in self.curve])
        # 1 nat per token: below that, a model that knew all may waver
        return values is None or values[-1] > max(values[0], 1.0)


def _finite(values: Sequence[float | None]) -> list[float] | None:
    """The numbers; None where one of them is not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if len(known) == len(values) else None


Outcomes = Mapping[str, Mapping[int, Outcome]]  # arm -> seed


@dataclass(frozen=True)
class Criterion:
    """`quantity` of arm a less that of arm b (at a noise level) must lie between low and high."""

    name: str
    statement: str
    quantity: str  # "accuracy", "retention", "same_noise" (of a alone), "gradient_norm", "held_out" (these as logs)
    a: str
    b: str
    level: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    falsifies: bool = False  # refuted, it falsifies the theory


def judge(criteria: Sequence[Criterion], outcomes: Outcomes, *, level: float = 0.95) -> list[JudgedCriterion]:
    """A row for each criterion: the estimate, an interval that holds for all together, the verdict."""
    if not criteria:
        return []
    each = stats.simultaneous_level(len(criteria), level)
    return [_row(criterion, outcomes, each) for criterion in criteria]


def _row(criterion: Criterion, outcomes: Outcomes, level: float) -> JudgedCriterion:
    low, high = (end if math.isfinite(end) else None for end in (criterion.low, criterion.high))
    row = JudgedCriterion(
        name=criterion.name,
        statement=criterion.statement,
        quantity=criterion.quantity,
        arms=(criterion.a, criterion.b),
        noise_level=criterion.level,
        region=(low, high),
        estimate=Estimate(None, None, None, 0, level),
        seeds=0,
        verdict=UNDECIDED,
        would_decide=None,
        falsifies=criterion.falsifies,
    )
    spread = spread_of(criterion, outcomes)
    if isinstance(spread, str):
        return replace(row, estimate=replace(row.estimate, note=spread))
    most = 1.0 if criterion.quantity in ("accuracy", "same_noise") else math.inf  # a difference of shares is no larger
    found = spread.estimate(level, -most, most)
    assert found.low is not None and found.high is not None
    beyond = "" if found.high < 0 else out_of_reach(criterion, outcomes[criterion.b])  # no ceiling makes an arm worse
    verdict = UNDECIDED
    if beyond:
        verdict = UNMEASURABLE
    elif criterion.low <= found.low and found.high <= criterion.high:
        verdict = SUPPORTED
    elif found.high < criterion.low or found.low > criterion.high:
        verdict = REFUTED
    needed = None if verdict != UNDECIDED else deciding(criterion, spread, level)
    estimate = replace(found, note=beyond)
    return replace(row, estimate=estimate, seeds=spread.seeds, verdict=verdict, would_decide=needed)


def out_of_reach(criterion: Criterion, others: Mapping[int, Outcome]) -> str:
    """Why the task allows one verdict only, or nothing: a share stays below 1, so a - b is no more than 1 - b."""
    if criterion.quantity != "accuracy":
        return ""
    known = float(np.mean([_accuracy(run, criterion.level) for run in others.values()]))
    room = 1 - known
    if room < criterion.low:
        missed = criterion.low
    elif criterion.low == -math.inf and room < criterion.high < math.inf:
        missed = criterion.high
    else:
        return ""
    return (
        f"{criterion.b} answers {100 * known:.1f} % correctly already, so {100 * missed:g} points more are out of "
        f"reach; use a higher noise level or a harder task"
    )


def deciding(criterion: Criterion, spread: Spread, level: float) -> Needed | None:
    """The cheapest numbers of seeds and problems that would decide with probability POWER, given the estimate."""

    def fewest_seeds(problems: int) -> int:
        def enough(seeds: int) -> bool:
            return chance(criterion, spread.mean, *spread.planned(seeds, problems, level)) >= POWER

        return 2 + bisect_left(range(2, MOST_SEEDS + 1), True, key=enough)

    found = []
    for times in (1, 2, 4, 8, 16, 32, 64) if spread.problems > 1 else (1,):
        problems = spread.problems * times
        seeds = fewest_seeds(problems)
        if seeds <= MOST_SEEDS:
            found.append((seeds * (1 + TEST_COST * times), seeds, problems))
    if not found:
        return None
    _, seeds, problems = min(found)
    return Needed(seeds, problems, POWER)


def chance(criterion: Criterion, mean: float, half: float, error: float) -> float:
    """That an interval of this half-width round a draw from N(mean, error^2) lies on the mean's side of the edges."""
    low, high, error = criterion.low - mean, criterion.high - mean, max(error, 1e-12)
    if low <= 0 <= high:
        return float(special.ndtr((high - half) / error) - special.ndtr((low + half) / error))
    return float(special.ndtr((low - half) / error) + special.ndtr(-(high + half) / error))


def estimate(values: Array, level: float = 0.95) -> Estimate:
    """The mean of values [seeds, problems] between 0 and 1 with its interval; without one for a single seed."""
    spread = crossed(values)
    if spread.seeds < 2:
        return Estimate(spread.mean, None, None, spread.problems, level, "one seed")
    return spread.estimate(level, 0.0, 1.0)


def arm_row(name: str, runs: Mapping[int, Outcome], levels: Sequence[float], *, dose: float | None = None) -> ArmRow:
    """An arm in numbers: accuracy and retention by level, stability of its training."""
    seeds = sorted(runs)
    every = [runs[seed] for seed in seeds]
    noisy = [level for level in levels if level and _learned(every)]
    injections = InjectionCounts(*(sum(run.injections[phase] for run in every) for phase in ("forward", "backward")))
    return ArmRow(
        name,
        tuple(seeds),
        {f"{level:g}": _arm_accuracy(every, level) for level in levels},
        {f"{level:g}": estimate(retained(every, level)) for level in noisy},
        ArmTraining(
            diverged=sum(run.diverged for run in every),
            gradient_norm=_geometric([run.log_mean("gradient_norm") for run in every]),
            held_out_loss=_geometric([run.log_mean("held_out") for run in every]),
            injections=injections,
            dose=None if dose is None else round(dose, 6),
        ),
        tuple(
            {
                f"{level:g}": round(float(np.mean([run.epochs[at][level].mean() for run in every])), 5)
                for level in levels
            }
            for at in range(min(len(run.epochs) for run in every))
        ),
    )


def _arm_accuracy(every: Sequence[Outcome], level: float) -> ArmAccuracy:
    found = estimate(np.stack([_accuracy(run, level) for run in every]))
    return ArmAccuracy(**vars(found), by_seed=tuple(round(float(run.answers[level].mean()), 5) for run in every))


def _geometric(logs: Sequence[float]) -> float | None:
    return None if not all(map(math.isfinite, logs)) else round(math.exp(float(np.mean(logs))), 5)


def _accuracy(run: Outcome, level: float) -> Array:
    """[problems]: the share of noise seeds under which each was right."""
    shares: Array = run.answers[level].mean(axis=1)
    return shares


def spread_of(criterion: Criterion, outcomes: Outcomes) -> Spread | str:
    """The criterion's quantity over the seeds that both arms have, or why it can't be measured."""
    a, b = outcomes.get(criterion.a, {}), outcomes.get(criterion.b, {})
    seeds = sorted(set(a) & set(b))
    if len(seeds) < 2:
        return (
            f"both arms were trained for {len(seeds)} of the seeds, but at least two are needed to estimate the spread"
        )
    if criterion.quantity in ("accuracy", "retention"):
        learned = [_learned([arm[s] for s in seeds]) for arm in (a, b)]
        if not (all(learned) if criterion.quantity == "retention" else any(learned)):
            return f"{stats.NOT_MEASURABLE}: without noise the models do no better than chance"
    if criterion.quantity == "same_noise":
        return crossed(np.stack([a[s].same[criterion.level].mean(1) - _accuracy(a[s], criterion.level) for s in seeds]))
    if criterion.quantity == "accuracy":
        return crossed(np.stack([_accuracy(a[s], criterion.level) - _accuracy(b[s], criterion.level) for s in seeds]))
    if criterion.quantity == "retention":
        return crossed(
            retained([a[s] for s in seeds], criterion.level) - retained([b[s] for s in seeds], criterion.level)
        )
    logs = np.array([[arm[s].log_mean(criterion.quantity) for arm in (a, b)] for s in seeds])
    if np.isnan(logs).any():
        return f"{stats.NOT_MEASURABLE}: a run diverged"
    if np.isinf(logs).any():
        return f"{stats.NOT_MEASURABLE}: {criterion.quantity} was 0 in a run, so there is no ratio"
    return crossed(logs[:, :1] - logs[:, 1:])


def _learned(runs: Sequence[Outcome]) -> bool:
    """Whether the clean accuracy is significantly above chance."""
    return stats.measurable(np.stack([_accuracy(run, 0.0) for run in runs]).mean(axis=0), CHANCE)


def retained(runs: Sequence[Outcome], level: float) -> Array:
    """accuracy(level) / accuracy(0) as values [seeds, problems]: their mean is the ratio, their spread its error."""
    clean = np.stack([_accuracy(run, 0.0) for run in runs])
    noisy = np.stack([_accuracy(run, level) for run in runs])
    ratio = noisy.mean() / clean.mean()
    linear: Array = ratio + (noisy - ratio * clean) / clean.mean()
    return linear


@dataclass(frozen=True)
class Spread:
    """A mean over seeds x problems with the mean squares of its two-way table."""

    mean: float
    seeds: int
    problems: int
    ms_seed: float  # estimates N v_seed + v_rest
    ms_problem: float  # estimates S v_problem + v_rest
    ms_rest: float

    def half_width(self, level: float) -> float:
        """Half the interval."""
        size = self.seeds * self.problems
        beside_rest = max(self.ms_problem - self.ms_rest, 0.0)
        return _half_width(self.ms_seed / size, beside_rest / size, self.seeds, self.problems, level)

    def estimate(self, level: float, least: float, most: float) -> Estimate:
        """The mean with its interval, cut to what the quantity can be."""
        half = self.half_width(level)
        return Estimate(self.mean, max(self.mean - half, least), min(self.mean + half, most), self.problems, level)

    def planned(self, seeds: int, problems: int, level: float) -> tuple[float, float]:
        """Half the interval, and the standard error of the mean, with so many, were the estimated variances true."""
        v_seed = max(self.ms_seed - self.ms_rest, 0.0) / self.problems
        v_problem = max(self.ms_problem - self.ms_rest, 0.0) / self.seeds
        a, b = v_seed / seeds + self.ms_rest / (seeds * problems), v_problem / problems
        return _half_width(a, b, seeds, problems, level), max(math.sqrt(a + b), _unseen(problems))


def _half_width(a: float, b: float, seeds: int, problems: int, level: float) -> float:
    """sqrt(t(S - 1)^2 a + t(N - 1)^2 b), and no less than the error of what was not met."""
    t_seeds, t_problems = (float(special.stdtrit(max(n - 1, 1), (1 + level) / 2)) for n in (seeds, problems))
    return max(math.sqrt(t_seeds**2 * a + t_problems**2 * b), t_seeds * _unseen(problems))


def _unseen(problems: int) -> float:
    """The standard error where all answers agree: one changed answer that was not met, 1 / (N + 2), after Agresti and
    Min. That seeds agree is known as well as there are seeds, so it goes with their quantile.
    """
    return 1 / (problems + 2) if problems > 1 else 0.0  # a single column holds no answers but one number a run


def crossed(values: Array) -> Spread:
    """The mean of values [seeds, problems], both random."""
    s, n = values.shape
    mean = float(values.mean())
    by_seed, by_problem = values.mean(axis=1), values.mean(axis=0)
    rest = values - by_seed[:, None] - by_problem[None, :] + mean
    ms_seed = n * float(np.var(by_seed, ddof=1)) if s > 1 else math.inf
    ms_problem = s * float(np.var(by_problem, ddof=1)) if n > 1 else 0.0
    return Spread(mean, s, n, ms_seed, ms_problem, float((rest**2).sum()) / max((s - 1) * (n - 1), 1))
