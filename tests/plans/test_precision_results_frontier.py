"""The frontier of bits against predicted KL, beside every plan there is."""

from __future__ import annotations

import itertools
import random

import pytest

from noisescope.diagnosis.section_types import FormatScore
from noisescope.plans.precision import Module, plan_of
from noisescope.plans.precision_results import frontier


def modules(draw: random.Random, count: int) -> list[Module]:
    found = []
    for number in range(count):
        costs = sorted((draw.random() ** 3 for _ in range(4)), reverse=True)
        if number % 2:
            draw.shuffle(costs)  # a format that no trade would use
        bits = (3, 4, 8, 16)
        choices = {f"f{b}": FormatScore(b, b, cost, None) for b, cost in zip(bits, costs, strict=True)}
        found.append(Module(f"m{number}", number, draw.choice((100, 300)), choices, 10, "mlp"))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_plan_lies_below_the_frontier(seed: int) -> None:
    """Against all 256 assignments: none costs less than the line between the frontier's points at its bits."""
    parts = modules(random.Random(seed), 4)
    points = frontier(parts)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    assert slopes == sorted(slopes)
    plans = [
        plan_of(parts, {part.name: name for part, name in zip(parts, names, strict=True)}, "")
        for names in itertools.product(*(part.choices for part in parts))
    ]
    for plan in plans:
        lines = (y + slope * (plan.average_bits - x) for (x, y), slope in zip(points, slopes, strict=False))
        assert plan.predicted_mean_kl >= max(lines) - 1e-9
    reached = {(round(plan.average_bits, 6), round(plan.predicted_mean_kl, 9)) for plan in plans}
    assert {(round(x, 6), round(y, 9)) for x, y in points} <= reached
