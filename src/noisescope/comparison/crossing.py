"""Divergence x sensitivity: what a difference costs, what to fix first, what each layer can afford.

A diagnosis predicts the KL of relative noise of scale s at a layer's operators, to second order KL = k s^2. A
difference of relative L2 r there costs about k r^2, as if it arose there and were noise. Errors that came in from
earlier layers are counted where they are seen, so costs of different layers must not be added up; `logits` in the
comparison has the sum as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.sites import Site

_SEEN_AS = {"attention": "matmul"}  # a fused call gives what its second product gives


@dataclass(frozen=True)
class Cell:
    """An operator of a layer: how far the devices are apart there, and what that costs."""

    layer: int
    operator: str
    relative_l2: float | None  # root mean square over the sites of the cell
    nats_per_square: float  # k
    nats: float | None
    affordable: float  # relative L2 that costs what is allowed
    fix_first: bool  # both divergence and sensitivity are above the median of all cells, and it costs too much

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Crossing:
    """All cells, the dearest first, and the tolerance of each layer."""

    cells: tuple[Cell, ...]
    tolerances: tuple[Mapping[str, Any], ...]
    affordable_nats: float

    @property
    def fix_first(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.fix_first)

    def to_dict(self) -> dict[str, Any]:
        return {
            "affordable_nats": self.affordable_nats,
            "fix_first": [cell.to_dict() for cell in self.fix_first],
            "cells": [cell.to_dict() for cell in self.cells],
            "tolerances": [dict(row) for row in self.tolerances],
        }


def crossed(sizes: Mapping[Site, float], report: Mapping[str, Any], model: str, affordable: float) -> Crossing:
    """Cross the relative L2 of sites with a report's map of layers x operators."""
    if affordable <= 0:
        raise InvalidInput(f"what a difference may cost is in nats, above 0; got {affordable}")
    constants = _constants(report, model)
    cells = []
    for (layer, operator), k in constants.items():
        here = [r for site, r in sizes.items() if site.place == layer and _seen_as(site) == operator]
        size = math.sqrt(sum(r * r for r in here) / len(here)) if here else None
        nats = None if size is None or not math.isfinite(size) else k * size**2
        cells.append(Cell(layer, operator, _finite(size), k, nats, _tolerance(affordable, k), False))
    cells = _marked(cells, affordable)
    cells.sort(key=lambda cell: -(cell.nats if cell.nats is not None else -1.0))
    return Crossing(tuple(cells), tuple(_tolerances(cells, affordable)), affordable)


def _constants(report: Mapping[str, Any], model: str) -> dict[tuple[int, str], float]:
    """Nats for a relative error of 1, by layer and operator."""
    run, analysis = report.get("run", {}), report.get("layer_analysis") or {}
    known = run.get("model", {}).get("fingerprint", "")
    if model and known and model != known:
        raise InvalidInput(
            f"the sensitivity report is about another model ({run['model'].get('architecture')}, fingerprint "
            f"{known[:12]}) than the records ({model[:12]}): diagnose this one, in the same dtype"
        )
    scale = run.get("settings", {}).get("noise_scale")
    rows = [(row, (row.get("predicted_kl") or row.get("kl") or {}).get("value")) for row in analysis.get("map", ())]
    found = {(row["layer"], row["operator"]): kl / scale**2 for row, kl in rows if kl is not None and scale}
    if not found:
        raise InvalidInput(
            "the sensitivity report has no map of layers and operators with a predicted KL: make it with "
            "`noisescope diagnose MODEL --level operator,layer`"
        )
    return found


def _seen_as(site: Site) -> str:
    return _SEEN_AS.get(site.operator, site.operator)


def _tolerance(affordable: float, k: float) -> float:
    """The relative L2 that costs `affordable`; 1, the tensor's own size, at most."""
    return min(1.0, math.sqrt(affordable / k)) if k > 0 else 1.0


def _marked(cells: list[Cell], affordable: float) -> list[Cell]:
    seen = [cell for cell in cells if cell.nats is not None]
    far = _median([cell.relative_l2 or 0.0 for cell in seen])
    sensitive = _median([cell.nats_per_square for cell in seen])
    return [replace(cell, fix_first=_both(cell, far, sensitive, affordable)) for cell in cells]


def _both(cell: Cell, far: float, sensitive: float, affordable: float) -> bool:
    if cell.nats is None or cell.nats <= affordable:
        return False
    return (cell.relative_l2 or 0.0) >= far and cell.nats_per_square >= sensitive


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _tolerances(cells: list[Cell], affordable: float) -> list[dict[str, Any]]:
    """Per layer: the relative L2 that all its operators may have at once, and the largest that they have."""
    rows = []
    for layer in sorted({cell.layer for cell in cells}):
        here = [cell for cell in cells if cell.layer == layer]
        allowed = _tolerance(affordable, sum(cell.nats_per_square for cell in here))
        found = max((cell.relative_l2 for cell in here if cell.relative_l2 is not None), default=None)
        rows.append(
            {
                "layer": layer,
                "affordable_relative_l2": allowed,
                "relative_l2": found,
                "within": None if found is None else found <= allowed,
            }
        )
    return rows


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
