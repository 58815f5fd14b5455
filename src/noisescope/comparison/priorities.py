"""Divergence x sensitivity: what a difference costs, what to fix first, and how much each layer tolerates.

A diagnosis predicts the KL of relative noise of scale s at a layer's operators, to second order KL = k s^2. A
difference of relative L2 r there costs about k r^2, as if it arose there and were noise. Where the report found that
injected noise does not cost what was predicted (nonlinear), k comes from the injection, and k r^2 is only rough.

Errors of earlier layers are counted where they are seen, so costs of different layers must not be added
up; `logits` in the comparison has the sum as it is. Where one side alone has NaN or infinite numbers the difference is
infinite: no cost, first to fix, whatever the sensitivity. `sheets` are the tables of a comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import TYPE_CHECKING, Literal

from noisescope.comparison.rows import BlockError, SiteRow, TokenRow
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import CellEffect
from noisescope.errors import InvalidInput
from noisescope.sites import Place
from noisescope.tables import Sheet, Table

if TYPE_CHECKING:
    from noisescope.comparison.compare import Comparison

Key = tuple[Place, str]
PricedBy = Literal["injected", "predicted"]
Price = tuple[float, PricedBy, bool]  # nats for a relative error of 1, their source, whether the report calls it rough

_SEEN_AS = {"attention": "matmul"}  # a fused call gives what its second product gives


@dataclass(frozen=True)
class CostCell:
    """An operator of a layer: how far the devices are apart there, and what that costs.

    `relative_l2` is the root mean square over the sites of the cell, None where there is nothing to measure or the
    difference is infinite. `nats_per_square` is k, None where the diagnosis does not know it; `priced_by` says whether
    it was predicted or injected, and `nonlinear` whether the diagnosis calls the cell or its layer so. `affordable` is
    the relative L2 that costs what is allowed. To fix first is what is infinite, or costs too much with both divergence
    and sensitivity above the median of all cells.
    """

    layer: Place
    operator: str
    relative_l2: float | None
    infinite: bool
    nats_per_square: float | None
    nats: float | None
    affordable: float | None
    priced_by: PricedBy | None
    nonlinear: bool
    fix_first: bool = False

    @property
    def cost(self) -> float:
        """Nats for sorting: infinite first, what is not known last."""
        return math.inf if self.infinite else -1.0 if self.nats is None else self.nats


@dataclass(frozen=True)
class Tolerance:
    """What the operators of a layer may all differ by at once, and the largest difference they have.

    It is rough where the diagnosis calls the layer or an operator in it `nonlinear`.
    A layer with sites that can't be measured is never known to be within its tolerance: `within` is None.
    """

    layer: int
    affordable_relative_l2: float
    relative_l2: float | None
    unmeasurable: int
    within: bool | None
    nonlinear: bool


@dataclass(frozen=True)
class DifferenceCosts:
    """All cells, the most expensive first, and the tolerance of each layer."""

    affordable_nats: float
    fix_first: tuple[CostCell, ...]
    cells: tuple[CostCell, ...]
    tolerances: tuple[Tolerance, ...]


def difference_costs(rows: Sequence[SiteRow], diagnosis: Diagnosis, model: str, affordable: float) -> DifferenceCosts:
    """Combine the relative L2 of sites, in execution order, with a diagnosis's layer x operator map."""
    if not 0 < affordable < math.inf:
        raise InvalidInput(f"the allowed cost of a difference is in nats and must be above 0; got {affordable}")
    prices = _prices(diagnosis, model)
    sizes: dict[Key, list[float]] = {}
    first_infinite: dict[Key, int] = {}
    for number, row in enumerate(rows):
        key = (row.place, _SEEN_AS.get(row.operator, row.operator))
        if row.size is not None:
            sizes.setdefault(key, []).append(row.size)
        if row.infinite:
            first_infinite.setdefault(key, number)
    keys = dict.fromkeys([*prices, *first_infinite])
    cells = _marked([_cell(key, sizes.get(key, []), prices.get(key), affordable) for key in keys], affordable)
    # the costliest first; of infinite ones the first that ran, since the others may only inherit it
    cells.sort(key=lambda cell: (-cell.cost, first_infinite.get((cell.layer, cell.operator), 0)))
    unmeasurable = Counter(row.place for row in rows if not row.measurable)
    fix_first = tuple(cell for cell in cells if cell.fix_first)
    return DifferenceCosts(affordable, fix_first, tuple(cells), tuple(_tolerances(cells, unmeasurable, affordable)))


def _cell(key: Key, sizes: list[float], price: Price | None, affordable: float) -> CostCell:
    size = math.sqrt(sum(r * r for r in sizes) / len(sizes)) if sizes else None
    infinite = size == math.inf
    known = None if infinite else size
    if price is None:
        return CostCell(*key, known, infinite, None, None, None, None, nonlinear=False)
    k, priced_by, nonlinear = price
    nats = None if known is None else k * known**2
    return CostCell(*key, known, infinite, k, nats, _tolerance(affordable, k), priced_by, nonlinear)


def _prices(diagnosis: Diagnosis, model: str) -> dict[Key, Price]:
    """By layer and operator."""
    known = diagnosis.run.model
    if model and known.fingerprint and model != known.fingerprint:
        raise InvalidInput(
            f"the sensitivity report describes a different model ({known.architecture}, fingerprint "
            f"{known.fingerprint[:12]}) from the records ({model[:12]}): diagnose the recorded model, in the same dtype"
        )
    section, scale = diagnosis.layer_analysis, diagnosis.run.settings.noise_scale
    if scale is None:
        raise InvalidInput(
            "the sensitivity report is of a number format, and noise alone shows what a difference of any size costs: "
            "make it with `noisescope diagnose MODEL --level operator,layer`"
        )
    cells = () if section is None else section.map
    nonlinear = frozenset(row.layer for row in section.layers if row.nonlinear) if section is not None else frozenset()
    known_prices = (((cell.layer, cell.operator), _price(cell, scale, nonlinear)) for cell in cells)
    found: dict[Key, Price] = {key: price for key, price in known_prices if price is not None}
    if not found:
        raise InvalidInput(
            "the sensitivity report has no layer x operator map of predicted KL: create one with "
            "`noisescope diagnose MODEL --level operator,layer`"
        )
    return found


def _price(cell: CellEffect, scale: float, nonlinear: frozenset[int]) -> Price | None:
    """The prediction is quadratic in the noise by construction, and all cells have one: it is taken where it holds.

    An injection is taken where the prediction failed beside it, or where there is none.
    """
    rough = cell.nonlinear or cell.layer in nonlinear
    predicted = None if cell.predicted_kl is None else cell.predicted_kl.mean.value
    injected = None if cell.kl is None else cell.kl.mean.value
    if injected is not None and (cell.nonlinear or predicted is None):
        return injected / scale**2, "injected", rough
    return None if predicted is None else (predicted / scale**2, "predicted", rough)


def _tolerance(affordable: float, k: float) -> float:
    """The relative L2 that costs `affordable`; 1, the tensor's own size, at most."""
    return min(1.0, math.sqrt(affordable / k)) if k > 0 else 1.0


def _marked(cells: list[CostCell], affordable: float) -> list[CostCell]:
    known = [cell for cell in cells if cell.nats is not None]
    far = median_high([cell.relative_l2 or 0.0 for cell in known] or [0.0])
    sensitive = median_high([cell.nats_per_square or 0.0 for cell in known] or [0.0])

    def comes_first(cell: CostCell) -> bool:
        above = (cell.relative_l2 or 0.0) >= far and (cell.nats_per_square or 0.0) >= sensitive
        return cell.infinite or (cell.cost > affordable and above)

    return [replace(cell, fix_first=comes_first(cell)) for cell in cells]


def _tolerances(cells: list[CostCell], unmeasurable: Mapping[Place, int], affordable: float) -> list[Tolerance]:
    rows = []
    for layer in sorted({cell.layer for cell in cells if isinstance(cell.layer, int)}):
        here = [cell for cell in cells if cell.layer == layer]
        allowed = _tolerance(affordable, sum(cell.nats_per_square or 0.0 for cell in here))
        infinite = any(cell.infinite for cell in here)
        largest = None if infinite else max((c.relative_l2 for c in here if c.relative_l2 is not None), default=None)
        broken = unmeasurable.get(layer, 0)
        within: bool | None = False
        if not infinite and (largest is None or largest <= allowed):
            within = None if largest is None or broken else True
        rows.append(Tolerance(layer, allowed, largest, broken, within, any(cell.nonlinear for cell in here)))
    return rows


_TONES = {"identical": "low", "round-off": "low", "diverged": "critical", "compared": "", "undecided": "moderate"}


def comparison_sheet(found: Comparison) -> Sheet:
    """The sites in the order they run; a notebook shows the first that diverges, then the largest differences."""
    tables = {
        "sites": Table.of(SiteRow, found.sites),
        "blocks": Table.of(BlockError, found.blocks),
        "tokens": Table.of(TokenRow, found.tokens),
    }
    if found.sensitivity is not None:
        tables["costs"] = Table.of(CostCell, found.sensitivity.cells)
    rows = sorted(found.sites, key=lambda row: (row is not found.first, -(row.size or 0.0)))
    heads = {"place": "place", "operator": "operator", "module": "module", "relative_l2": "relative L2"}
    if any(row.mape is not None for row in rows):
        heads |= {"mape": "MAPE", "max_ulp": "largest error, ulp"}
    heads["diverges"] = "diverges"
    sides = (
        f"{name}: {side.path}, {side.dtype}, {side.device}"
        for name, side in (("a", found.sides.a), ("b", found.sides.b))
    )
    lines = (found.words, *sides, *found.notes)
    shown = None if found.verdict == "identical" else Table.of(SiteRow, rows)
    return Sheet(found.verdict, tables, heads if shown else {}, lines, shown, _TONES[found.verdict])
