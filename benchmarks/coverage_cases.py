"""What intervals are tried on: distributions with known truth, and the bundled model's own KL to draw from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from noisescope.stats.score_arrays import Array
from noisescope.stats.typical import TRIM

Random = np.random.Generator
Draw = Callable[[Random, tuple[int, int]], Array]
PairDraw = Callable[[Random, tuple[int, int]], tuple[Array, Array]]
POPULATION = Path(__file__).parent / "results" / "kl_population.json"
WINDOWS = 14


@dataclass(frozen=True)
class Tail:
    """One value per sample, and what is true of all of them."""

    name: str
    draw: Draw
    mean: float
    median: float
    typical: float


@dataclass(frozen=True)
class Pairs:
    """Two values per sample (below, above), the ratio of their means and the median of their ratios."""

    name: str
    draw: PairDraw
    of_means: float
    typical: float


def typical_values(rows: Array) -> Array:
    """`stats.typical` of each row, without intervals."""
    n = rows.shape[1]
    cut = int(TRIM * n)
    with np.errstate(divide="ignore"):
        inner = np.log(np.sort(rows, axis=1)[:, cut : n - cut])
    mostly_zero = np.count_nonzero(rows == 0, axis=1) > cut
    found: Array = np.where(mostly_zero, np.median(rows, axis=1), np.exp(inner.mean(axis=1)))
    return found


def tail(name: str, draw: Draw, mean: float) -> Tail:
    """Median and typical value from two million draws."""
    many = draw(np.random.default_rng(2), (1, 2_000_000))
    return Tail(name, draw, mean, float(np.median(many)), float(typical_values(many)[0]))


def drawn_from(name: str, values: Array) -> Tail:
    """Draws with replacement: the population is what was measured."""
    row = values[np.newaxis]
    truths = (
        float(values.mean()),
        float(np.median(values)),
        float(typical_values(row)[0]),
    )
    return Tail(name, lambda random, shape: random.choice(values, shape), *truths)


def lognormal(sigma: float) -> tuple[Draw, float]:
    return lambda random, shape: random.lognormal(0, sigma, shape), math.exp(sigma**2 / 2)


def exponential() -> tuple[Draw, float]:
    return lambda random, shape: random.exponential(size=shape), 1.0


def pareto(alpha: float) -> tuple[Draw, float]:
    return lambda random, shape: 1 + random.pareto(alpha, shape), alpha / (alpha - 1)


def mixed(base: tuple[Draw, float], share: float = 0.01, factor: float = 100.0) -> tuple[Draw, float]:
    """A share of the values is so many times larger."""
    draw, mean = base

    def both(random: Random, shape: tuple[int, int]) -> Array:
        values = draw(random, shape)
        return np.where(random.random(shape) < share, factor * values, values)

    return both, mean * (1 - share + share * factor)


def population() -> dict[str, dict[str, Array]]:
    stored: dict[str, Any] = json.loads(POPULATION.read_text(encoding="utf-8"))["windows"]
    return {window: {name: np.array(values) for name, values in rows.items()} for window, rows in stored.items()}


def tails() -> list[Tail]:
    made = [
        *((f"lognormal, sigma {sigma}", lognormal(sigma)) for sigma in (1, 2, 3)),
        *((f"Pareto, alpha {alpha}", pareto(alpha)) for alpha in (1.1, 1.5, 2.5)),
        ("lognormal 1, 1 % of 100 x", mixed(lognormal(1))),
        ("exponential, 1 % of 100 x", mixed(exponential())),
    ]
    real = [drawn_from(f"bundled model, layers {name}", rows["injected"]) for name, rows in population().items()]
    return [tail(name, *rest) for name, rest in made] + real


def correlated(sigma: float, tau: float) -> Pairs:
    """below = lognormal(sigma), above = below x lognormal with mean 1 and sigma tau."""

    def draw(random: Random, shape: tuple[int, int]) -> tuple[Array, Array]:
        below = random.lognormal(0, sigma, shape)
        return below, below * random.lognormal(-(tau**2) / 2, tau, shape)

    return Pairs(f"lognormal {sigma} x lognormal {tau}", draw, 1.0, math.exp(-(tau**2) / 2))


def independent(sigma: float) -> Pairs:
    def draw(random: Random, shape: tuple[int, int]) -> tuple[Array, Array]:
        return random.lognormal(0, sigma, shape), random.lognormal(0, sigma, shape)

    return Pairs(f"two independent lognormal {sigma}", draw, 1.0, 1.0)


def to_constant(sigma: float) -> Pairs:
    def draw(random: Random, shape: tuple[int, int]) -> tuple[Array, Array]:
        return np.ones(shape), random.lognormal(-(sigma**2) / 2, sigma, shape)

    return Pairs(f"lognormal {sigma} to a constant", draw, 1.0, math.exp(-(sigma**2) / 2))


def paired_population(name: str, below: Array, above: Array) -> Pairs:
    def draw(random: Random, shape: tuple[int, int]) -> tuple[Array, Array]:
        which = random.integers(0, len(below), shape)
        return below[which], above[which]

    return Pairs(name, draw, float(above.mean() / below.mean()), float(np.median(above / below)))


def pair_cases() -> list[Pairs]:
    real, rows = [], population()
    for window, columns in rows.items():
        real.append(paired_population(f"injected / predicted, {window}", columns["predicted"], columns["injected"]))
    for window, columns in rows.items():
        real.append(paired_population(f"interaction index, {window}", columns["layers"], columns["injected"]))
    first, second = rows["4 to 6"]["injected"], rows["8 to 10"]["injected"]
    real.append(paired_population("one plan / another (KL of two windows)", second, first))
    made = [correlated(s, t) for s, t in ((1, 0.5), (1, 1), (2, 0.5), (2, 1), (3, 0.5))]
    return [*made, independent(1), independent(2), to_constant(1), to_constant(2), *real]


def losses(truth: str) -> Array:
    """The share of its score that each of fourteen windows loses."""
    at = np.arange(WINDOWS)
    return {
        "equal": np.full(WINDOWS, 0.1),
        "spread": np.linspace(0.02, 0.2, WINDOWS),
        "one leading": np.where(at == 5, 0.3, 0.1),
    }[truth]


def windows_of(random: Random, samples: int, overlap: bool) -> Array:
    """Standard normal values [windows, samples]: windows of three of sixteen layers, or independent ones."""
    if not overlap:
        return random.normal(size=(WINDOWS, samples))
    single = random.normal(size=(WINDOWS + 2, samples))
    return (single[:-2] + single[1:-1] + single[2:]) / math.sqrt(3)


def right_or_wrong(
    random: Random, n: int, loss: Array, *, overlap: bool = True, seeds: int = 3
) -> tuple[Array, list[Array]]:
    """0/1 scores: accuracy 0.9; a sample has its own frailty, which all windows share where they overlap."""
    clean = (random.random(n) < 0.9).astype(float)
    frailty = random.normal(size=(1, n, 1)) if overlap else random.normal(size=(WINDOWS, n, 1))
    noise = windows_of(random, n * seeds, overlap).reshape(WINDOWS, n, seeds)
    lost = math.sqrt(0.4) * frailty + math.sqrt(0.6) * noise > norm.isf(loss)[:, np.newaxis, np.newaxis]
    return clean, [clean[:, np.newaxis] * (1 - one) for one in lost]


def continuous_scores(random: Random, n: int, loss: Array, *, overlap: bool = True) -> tuple[Array, list[Array]]:
    clean = random.normal(5, 1, n)
    shared = random.normal(size=n) if overlap else 0.0
    return clean, list(clean - 5 * loss[:, np.newaxis] - math.sqrt(0.5) * (shared + windows_of(random, n, overlap)))


def correlated_points(random: Random, kind: str, rho: float, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Points with Pearson correlation rho before they are made heavy-tailed."""
    x, e = random.normal(size=(2, *shape))
    y = rho * x + math.sqrt(1 - rho**2) * e
    if kind == "Student's t, 3 degrees":
        scale = np.sqrt(3 / random.chisquare(3, shape))
        return x * scale, y * scale
    if kind == "lognormal, sigma 1":
        return np.exp(x), np.exp(y)
    return x, y


def true_correlation(kind: str, rho: float, method: str) -> float:
    """Closed forms; for ranks of Student's t from two million draws."""
    if method == "spearman" and kind == "Student's t, 3 degrees":
        x, y = correlated_points(np.random.default_rng(3), kind, rho, (1, 2_000_000))
        return float(np.corrcoef(np.argsort(np.argsort(x[0])), np.argsort(np.argsort(y[0])))[0, 1])
    if method == "spearman":
        return 6 / math.pi * math.asin(rho / 2)
    return (math.exp(rho) - 1) / (math.e - 1) if kind == "lognormal, sigma 1" else rho
