"""A comparison of two records in brief, and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noisescope.comparison.priorities import CostCell
from noisescope.comparison.rows import BlockError, SiteRow, TokenRow
from noisescope.tables import Sheet, Table

if TYPE_CHECKING:
    from noisescope.comparison.compare import Comparison

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
