"""Per-layer factors of the noise from a sensitivity report: brittle layers get less, sturdy ones more. No torch.

Two rules are those of the original method notes, by name; both are of degradations (the share of the accuracy that
noise in the layer takes), which the notes' limits are stated in. The third is smooth: to second order a layer's noise
costs K m^2 nats, where K is its predicted (or injected) KL at the common scale and m its factor. Equal cost in every
layer, at the total that uniform noise has, is

    m_l = sqrt(mean K / K_l).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import Effect, LayerAnalysis
from noisescope.errors import InvalidInput, unknown
from noisescope.reports.report import Report
from noisescope.sites import Place

# Degradation below which the factor is 2.0, and above which it is 0.5.
RULES = {"methodology": (0.05, 0.15), "summary": (0.02, 0.10)}
LIMITS = (0.25, 4.0)  # factors of the smooth rule: a layer that seems to cost nothing is not given all the noise


def ruled(degradations: Mapping[int, float | None], rule: str = "methodology") -> dict[Place, float]:
    """0.5 for layers above the rule's upper limit, 2.0 below its lower one, 1.0 between; 1.0 where nothing is known.

    >>> ruled({0: 0.2, 1: 0.1, 2: 0.01})
    {0: 0.5, 1: 1.0, 2: 2.0}
    """
    if rule not in RULES:
        raise unknown("adaptive rule", rule, RULES)
    low, high = RULES[rule]
    return {
        layer: 1.0 if loss is None or low <= loss <= high else 0.5 if loss > high else 2.0
        for layer, loss in degradations.items()
    }


def equalised(costs: Mapping[int, float], limits: tuple[float, float] = LIMITS) -> dict[Place, float]:
    """Factors with which each layer costs the same KL, at the total cost of uniform noise, within `limits`.

    >>> equalised({0: 4.0, 1: 4.0, 2: 4.0})
    {0: 1.0, 1: 1.0, 2: 1.0}
    """
    if not costs or any(not math.isfinite(cost) or cost < 0 for cost in costs.values()) or not any(costs.values()):
        raise InvalidInput(f"costs must be finite KLs of at least 0, one above 0; got {dict(costs)}")
    low, high = limits

    def factors(level: float) -> dict[Place, float]:
        return {layer: min(max(math.sqrt(level / cost), low), high) if cost else high for layer, cost in costs.items()}

    total = math.fsum(costs.values())
    below, above = 0.0, total  # what one layer may cost; what all cost together grows with it
    for _ in range(100):
        level = (below + above) / 2
        spent = math.fsum(factors(level)[layer] ** 2 * cost for layer, cost in costs.items())
        below, above = (level, above) if spent < total else (below, level)
    return {layer: round(factor, 6) for layer, factor in factors((below + above) / 2).items()}


def layer_degradations(section: LayerAnalysis) -> dict[int, float | None]:
    """Degradation of each layer: its own injection where there is one, else the mean of the windows that hold it."""

    def loss(row: Effect) -> float | None:
        return None if row.degradation is None else row.degradation.value

    found: dict[int, float | None] = {}
    for row in section.layers:
        around = (loss(window) for window in section.windows if row.layer in window.layers)
        known = [value for value in around if value is not None]
        own = loss(row)
        found[row.layer] = own if own is not None else math.fsum(known) / len(known) if known else None
    return found


def layer_costs(section: LayerAnalysis) -> dict[int, float]:
    """KL of each layer at the report's scale: predicted by the screen, or injected where every layer was."""
    for measured in ({row.layer: row.predicted_kl for row in section.layers}, {r.layer: r.kl for r in section.layers}):
        values = {layer: kl.mean.value for layer, kl in measured.items() if kl is not None}
        known = {layer: value for layer, value in values.items() if value is not None}
        if known and len(known) == len(measured):
            return known
    raise InvalidInput("the report has no KL for every layer: run noisescope diagnose with --level layer")


def from_report(report: Report | Diagnosis, rule: str = "equalised") -> dict[Place, float]:
    """Factors by the smooth rule, or by one of the original method notes' ("methodology", "summary")."""
    section = (report if isinstance(report, Diagnosis) else report.diagnosis).layer_analysis
    if section is None:
        raise InvalidInput("the report has no layer analysis: run noisescope diagnose with --level layer")
    if rule == "equalised":
        return equalised(layer_costs(section))
    if rule not in RULES:
        raise unknown("adaptive rule", rule, ["equalised", *RULES])
    return ruled(layer_degradations(section), rule)
