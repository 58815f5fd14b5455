"""The error of a mean over seeds x problems, as it is and as it would be with more of either. No torch.

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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]


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
