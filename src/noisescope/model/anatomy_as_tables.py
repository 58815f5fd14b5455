"""The anatomy of a model as tables: operators by place, and every module that computes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noisescope.sites import OPERATORS, Place, place_order, place_ranges
from noisescope.tables import Sheet, Table

if TYPE_CHECKING:
    from noisescope.model.anatomy import Anatomy, Unit

_COLUMNS = ("place", "module", "operator", "count", "component", "role", "packed", "remark")


def anatomy_sheet(anatomy: Anatomy, title: str) -> Sheet:
    """A notebook shows how often one forward computes each operator, by place; alike blocks are one row."""
    rows = folded(anatomy.counts())
    operators = [op for op in OPERATORS if any(op in row["counts"] for row in rows)]
    counts = ((place_ranges(row["places"]), *(row["counts"].get(op) for op in operators)) for row in rows)
    by_place = Table(("place", *operators), tuple(counts))
    modules = (
        (unit.place, unit.module, operator, count, unit.component, unit.role, unit.packed, _remark(unit))
        for unit in _computing(anatomy)
        for operator, count in _counts(unit).items()
    )
    absent = ", ".join(anatomy.absent())
    lines = (f"Absent: {absent}." if absent else "", *anatomy.notes)
    tables = {"modules": Table(_COLUMNS, tuple(modules)), "places": by_place}
    heads = {name: name for name in by_place.columns}
    return Sheet(title, tables, heads, tuple(filter(None, lines)), by_place)


def folded(counts: dict[Place, dict[str, int]]) -> list[dict[str, Any]]:
    """Blocks that compute the same, as one entry: [{"places": [0, 1, 2], "counts": {"linear": 7}}]."""
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place, here in counts.items():
        outer = "" if isinstance(place, int) else place  # only blocks are folded
        groups.setdefault((outer, *((op, here[op]) for op in OPERATORS if op in here)), []).append(place)
    rows = [{"places": places, "counts": dict(key[1:])} for key, places in groups.items()]
    return sorted(rows, key=lambda row: place_order(row["places"][0]))


def module_rows(anatomy: Anatomy) -> list[dict[str, Any]]:
    """Every module that computes an operator, in the order of the model."""
    return [
        {"module": unit.module, "place": unit.place, "counts": _counts(unit), "remark": _remark(unit)}
        for unit in _computing(anatomy)
    ]


def _computing(anatomy: Anatomy) -> list[Unit]:
    return sorted((unit for unit in anatomy.units if unit.operators), key=lambda unit: place_order(unit.place))


def _counts(unit: Unit) -> dict[str, int]:
    return dict(zip(unit.operators, unit.counts or (1,) * len(unit.operators), strict=True))


def _remark(unit: Unit) -> str:
    remarks = ["only when named"] if unit.left_alone else []
    remarks += [f"packed ({unit.packed})"] if unit.packed else []
    return ", ".join([*remarks, *([] if unit.certain else ["may be called"])])
