"""Divergence x sensitivity: what a difference costs, what to fix first, what each layer can afford.

A diagnosis predicts the KL of relative noise of scale s at a layer's operators, to second order KL = k s^2. A
difference of relative L2 r there costs about k r^2, as if it arose there and were noise. Errors that came in from
earlier layers are counted where they are seen, so costs of different layers must not be added up; `logits` in the
comparison has the sum as it is. Where one side alone has NaN or infinite numbers the difference is infinite: no price,
first to fix, whatever the sensitivity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from noisescope.comparison.measures import Measures, plain
from noisescope.errors import InvalidInput
from noisescope.sites import Place, Site

Key = tuple[Place, str]

_SEEN_AS = {"attention": "matmul"}  # a fused call gives what its second product gives


@dataclass(frozen=True)
class Cell:
    """An operator of a layer: how far the devices are apart there, and what that costs."""

    layer: Place
    operator: str
    relative_l2: float | None  # root mean square over the sites of the cell; None where there is nothing to measure
    nats_per_square: float | None  # k; None where the report does not tell, and the difference is infinite
    nats: float | None
    affordable: float | None  # relative L2 that costs what is allowed
    fix_first: bool = False  # infinite; or too dear, with divergence and sensitivity above the median of all cells

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "relative_l2": plain(self.relative_l2), "nats": plain(self.nats)}


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


def crossed(measured: Mapping[Site, Measures], report: Mapping[str, Any], model: str, affordable: float) -> Crossing:
    """Cross the relative L2 of sites, given in the order they ran, with a report's map of layers x operators."""
    if not 0 < affordable < math.inf:
        raise InvalidInput(f"what a difference may cost is in nats, above 0; got {affordable}")
    constants = _constants(report, model)
    sizes: dict[Key, list[float]] = {}
    first_infinite: dict[Key, int] = {}
    unmeasurable = Counter(site.place for site, found in measured.items() if not found.measurable)
    for number, (site, found) in enumerate(measured.items()):
        key = (site.place, _SEEN_AS.get(site.operator, site.operator))
        if found.relative_l2 is not None:
            sizes.setdefault(key, []).append(found.relative_l2)
            if math.isinf(found.relative_l2):
                first_infinite.setdefault(key, number)
    keys = dict.fromkeys([*constants, *first_infinite])
    cells = _marked([_cell(key, sizes.get(key, []), constants.get(key), affordable) for key in keys], affordable)
    # the dearest first; of infinite ones the first that ran, since the others may only inherit it
    cells.sort(key=lambda cell: (-_price(cell), first_infinite.get((cell.layer, cell.operator), 0)))
    return Crossing(tuple(cells), tuple(_tolerances(cells, unmeasurable, affordable)), affordable)


def _cell(key: Key, sizes: list[float], k: float | None, affordable: float) -> Cell:
    size = math.sqrt(sum(r * r for r in sizes) / len(sizes)) if sizes else None
    if size == math.inf:
        nats: float | None = math.inf
    else:
        nats = None if size is None or k is None else k * size**2
    return Cell(*key, size, k, nats, None if k is None else _tolerance(affordable, k))


def _price(cell: Cell) -> float:
    return -1.0 if cell.nats is None else cell.nats


def _constants(report: Mapping[str, Any], model: str) -> dict[Key, float]:
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


def _tolerance(affordable: float, k: float) -> float:
    """The relative L2 that costs `affordable`; 1, the tensor's own size, at most."""
    return min(1.0, math.sqrt(affordable / k)) if k > 0 else 1.0


def _marked(cells: list[Cell], affordable: float) -> list[Cell]:
    seen = [cell for cell in cells if plain(cell.nats) is not None]
    far = _median([cell.relative_l2 or 0.0 for cell in seen])
    sensitive = _median([cell.nats_per_square for cell in seen if cell.nats_per_square is not None])
    return [replace(cell, fix_first=_comes_first(cell, far, sensitive, affordable)) for cell in cells]


def _comes_first(cell: Cell, far: float, sensitive: float, affordable: float) -> bool:
    if cell.relative_l2 == math.inf:
        return True
    if _price(cell) <= affordable:
        return False
    return (cell.relative_l2 or 0.0) >= far and (cell.nats_per_square or 0.0) >= sensitive


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _tolerances(cells: list[Cell], unmeasurable: Mapping[Place, int], affordable: float) -> list[dict[str, Any]]:
    """Per layer: the relative L2 that all its operators may have at once, and the largest that they have.

    A layer with sites that can't be measured is never known to be within its tolerance.
    """
    rows = []
    for layer in sorted({cell.layer for cell in cells if isinstance(cell.layer, int)}):
        here = [cell for cell in cells if cell.layer == layer]
        allowed = _tolerance(affordable, sum(cell.nats_per_square or 0.0 for cell in here))
        found = max((cell.relative_l2 for cell in here if cell.relative_l2 is not None), default=None)
        within = None if found is None else found <= allowed
        rows.append(
            {
                "layer": layer,
                "affordable_relative_l2": allowed,
                "relative_l2": plain(found),
                "unmeasurable": unmeasurable.get(layer, 0),
                "within": None if within and layer in unmeasurable else within,
            }
        )
    return rows
