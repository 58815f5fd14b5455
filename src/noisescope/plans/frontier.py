"""What fewer bits cost at best: predicted KL over average bits per weight, for mixes of number formats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from noisescope.plans.precision import Module


def frontier(modules: Sequence[Module]) -> list[tuple[float, float]]:
    """(average bits, predicted KL) from the fewest bits to the most, each bit spent where it gains most.

    The lower convex hull of all plans: what lies between two of its points an optimal plan may undercut a little.
    """
    weights = sum(module.parameters for module in modules)
    hulls = [_hull(module, weights) for module in modules]
    bits, cost = (sum(hull[0][at] for hull in hulls) for at in (0, 1))
    steps = [(b[0] - a[0], b[1] - a[1]) for hull in hulls for a, b in itertools.pairwise(hull)]
    found = [(bits, cost)]
    for more, gain in sorted(steps, key=lambda step: step[1] / step[0]):
        bits, cost = bits + more, cost + gain
        found.append((bits, cost))
    return found


def _hull(module: Module, weights: int) -> list[tuple[float, float]]:
    """The formats of a module that a convex trade of bits for KL would use, from the fewest bits."""
    share = module.parameters / weights
    points = sorted((choice.bits * share, choice.predicted_kl) for choice in module.choices.values())
    hull: list[tuple[float, float]] = []
    for bits, cost in points:
        if hull and cost >= hull[-1][1]:  # no gain
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (bits, cost)):
            hull.pop()
        hull.append((bits, cost))
    return hull


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])
