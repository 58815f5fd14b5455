"""The cells of the fault-finding benchmark: which fault, where, how large, on which model, and healthy controls.

Two parts, and controls among them:

- `notes`: the six families of the original method notes at a block's output, every block x size x (dense, 10 %).
- `operators`: every family at every operator of a block (and embed, final_norm, lm_head) where it makes sense, at every
  size and density. Blocks take turns, in an order of each family's and position's own, so that all of them occur.

A cell's seed, prompt and place in the order follow from a hash of what it is: other cells change nothing about it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from noisescope.faults import FAMILIES, BlockScale, Fault, Lanes, Truncation, Where, make_fault
from noisescope.faults.fault import PRODUCTS
from noisescope.model.anatomy import Anatomy
from noisescope.sites import OUTER_PLACES, Place
from noisescope.testing import MODELS as TINY

DTYPES = ("float32", "bfloat16", "float16")
NOTES = ("dead_zone", "saturation", "spike", "noise", "bias", "non_determinism")
TENTH = "10 %"
QUICK = 20  # one cell in so many
CONTROLS = 4  # faults to a control, at most
TINY_PROMPTS = 2  # controls on each tiny architecture and dtype, beside those on the models under test
PROMPTS = 10**6
REPEATS = 3  # blocks on which a family of one operator is tried with the same settings

Settings = dict[str, Any]
Axis = Callable[[Any], Any]  # what a cell has on one axis of the grid

_SHARES: list[Settings] = [{"magnitude": m} for m in (0.01, 0.05, 0.1, 0.3)]
_GAINS: list[Settings] = [{"magnitude": m} for m in (0.001, 0.003, 0.01, 0.1)]
_TABLES: list[Settings] = [{"magnitude": m} for m in (0.002, 0.02, 0.1)]

# Every family's settings, from mild to severe.
SIZES: dict[str, list[Settings]] = {
    "dead_zone": _SHARES,
    "saturation": _SHARES,
    "spike": _SHARES,
    "noise": _SHARES,
    "bias": _SHARES,
    "non_determinism": [
        {"variance_factor": 1.01},
        {"variance_factor": 1.05, "mode": "inconsistent"},
        {"variance_factor": 1.05, "mode": "correlated"},
        {"variance_factor": 2.0, "mode": "suppressed"},
        {"variance_factor": 5.0},
        {"variance_factor": 5.0, "mode": "biased"},
    ],
    "stuck_bit": [{"bit": 0}, {"bit": 3, "value": 0}, {"bit": 6}, {"bit": 9, "value": 0}, {"bit": 12}],
    "bit_flip": [{"share": 1e-4}, {"share": 1e-3}, {"share": 1e-3, "persistent": True}, {"share": 1e-2}],
    "dead_lane": [{}],
    "stuck_lane": [{"magnitude": m} for m in (0.1, 1.0, 10.0)],
    "dead_k_lane": [{}],
    "swapped_channels": [{}, {"distance": 8}],
    "gain": _GAINS,
    "truncation": [{"cut": cut} for cut in (1, 2, 4, 7)],
    "rounding_mode": [{"mode": "toward_zero"}, {"mode": "down"}, {"mode": "up"}],
    "flush_to_zero": [{}, *({"magnitude": m, "relative_to": "rms"} for m in (1e-3, 1e-2, 0.1))],
    "accumulation": [{"precision": 16}, {"precision": "fp16"}, {"chunk": 64}, {"chunk": 32}],
    "input_truncation": [{"keep": keep} for keep in (10, 7, 4)],
    "exp_table": [{"magnitude": 0.0005}, {"magnitude": 0.005}, {"magnitude": 0.0, "clip": 4.0}, {"magnitude": 0.02}],
    "activation_table": _TABLES,
    "activation_cut_off": [{"limit": 8.0}, {"limit": 4.0}, {"limit": 2.0}],
    "rsqrt_table": _TABLES,
    "norm_gain": _GAINS,
    "normaliser_gain": _GAINS,
    "stale_tile": [{"rows": 2, "columns": 4}, {}],
    "nan_to_zero": [{}],
    "block_scale": [
        {"factor": 1.0625, "width": 16},
        {"factor": 0.5},
        {"factor": 2.0},
        {"factor": 2.0, "tensor": "input"},
    ],
}
_WHOLE = ("nan_to_zero", "stale_tile", "block_scale", "accumulation", "input_truncation", "rounding_mode")
_LANED = ("dead_lane", "stuck_lane", "dead_k_lane", "swapped_channels")  # dense, they would leave nothing


@dataclass(frozen=True)
class Cell:
    """One run of a locator: a fault somewhere, or none."""

    model: str
    dtype: str
    part: str  # "notes", "operators" or "control"
    prompt: int
    fault: Fault | None = None
    where: Where | None = None
    density: str = ""
    severity: int = 0  # of the fault's settings, in the family's list

    @property
    def id(self) -> str:
        return _hash(self.model, self.dtype, self.part, self.prompt, _spoken(self.fault), str(self.where))

    def to_dict(self) -> dict[str, Any]:
        """What the record of a run says about its cell."""
        known = {"cell": self.id, "model": self.model, "dtype": self.dtype, "part": self.part, "prompt": self.prompt}
        if self.fault is None or self.where is None:
            return known
        return known | {
            "family": self.fault.family,
            "wanted_class": self.fault.fault_class,
            "size": size_text(self.fault),
            "severity": self.severity,
            "density": self.density,
            "seed": self.fault.seed,
            "place": self.where.place,
            "operator": self.where.operator,
            "module": self.where.module,
            "occurrence": self.where.occurrence or 0,
            "fault": self.fault.to_dict(),
        }


@dataclass(frozen=True)
class Position:
    """An operator of a block (its module's name without the block's) or of an outer place."""

    operator: str
    module: str
    occurrence: int
    outer: Place | None = None

    def where(self, anatomy: Anatomy, block: int) -> Where:
        if self.outer is not None:
            return Where(self.outer, self.operator, self.module, self.occurrence)
        return Where(block, self.operator, anatomy.blocks[block] + self.module, self.occurrence)


def grid(models: dict[str, Anatomy], dtypes: Iterable[str] = DTYPES, *, tiny: Iterable[str] = TINY) -> list[Cell]:
    """Every cell, shuffled by its own hash; the locator sees neither the cell nor the order."""
    cells = []
    for (model, anatomy), dtype in itertools.product(models.items(), dtypes):
        faults = [*_notes(model, dtype, anatomy), *_operators(model, dtype, anatomy)]
        cells += faults
        cells += _controls(model, dtype, -(-len(faults) // CONTROLS))
    for name, dtype in itertools.product(tiny, dtypes):
        cells += _controls(f"tiny:{name}", dtype, TINY_PROMPTS)
    return sorted(cells, key=lambda cell: _hash("order", cell.id))


def is_quick(cell: Cell) -> bool:
    """Whether a cell is of the small grid: a fixed share of the whole, chosen by hash."""
    return int(_hash("quick", cell.id), 16) % QUICK == 0


def sample(cells: list[Cell], count: int) -> list[Cell]:
    """At most `count` cells of each part, spread evenly over what the part varies, always the same ones.

    Operators: every family and dtype takes turns, within them the operators, then blocks and sizes by hash. Notes:
    every family, density and size takes turns, within them dtypes. Controls: models, within them dtypes.
    """
    axes: dict[str, tuple[Axis, ...]] = {
        "operators": (lambda c: (c.fault.family, c.dtype), lambda c: c.where.operator),
        "notes": (lambda c: (c.fault.family, c.density, c.severity), lambda c: c.dtype),
        "control": (lambda c: c.model, lambda c: c.dtype),
    }
    chosen = []
    for part, by in axes.items():
        chosen += _in_turn([cell for cell in cells if cell.part == part], by)[:count]
    return sorted(chosen, key=lambda cell: _hash("order", cell.id))


def _in_turn(cells: list[Cell], axes: tuple[Axis, ...]) -> list[Cell]:
    """The groups of the first axis take turns, each in the order that the other axes give it."""
    if not axes:
        return cells
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(axes[0](cell), []).append(cell)
    turns = itertools.zip_longest(*(_in_turn(group, axes[1:]) for group in groups.values()))
    return [cell for turn in turns for cell in turn if cell is not None]


def positions(anatomy: Anatomy) -> list[Position]:
    """The operators of block 0, which stands for all, and the outer ones."""
    found = []
    for unit in anatomy.units:
        inside = unit.place == 0
        if not unit.certain or unit.left_alone or not (inside or unit.place in OUTER_PLACES):
            continue
        module = unit.module.removeprefix(anatomy.blocks[0]) if inside else unit.module
        for operator, count in zip(unit.operators, unit.counts or (1,) * len(unit.operators), strict=True):
            outer = None if inside else unit.place
            found += [Position(operator, module, occurrence, outer) for occurrence in range(count)]
    return found


def size_text(fault: Fault) -> str:
    """A fault's settings that its family's list of sizes names."""
    fields = fault.to_dict()
    listed = {name for settings in SIZES[fault.family] for name in settings}
    named = [f"{name}={fields[name]}" for name in fields if name in listed and name != fault.sized_by]
    return " ".join([*([] if fault.size is None else [f"{fault.size:g}"]), *named]) or "-"


def classes(fault: Fault, width: int) -> set[str]:
    """The classes that a fault has by definition, on an output of so many channels: mostly one."""
    found = {fault.fault_class}
    if isinstance(fault, Truncation) and fault.cut == 1:
        found.add("stuck bit")  # bit 0 is always 0
    if isinstance(fault, BlockScale) and fault.tensor == "output" and fault.width >= width:
        found.add("gain")  # the block is the whole output
    return found


def _notes(model: str, dtype: str, anatomy: Anatomy) -> Iterator[Cell]:
    blocks = range(len(anatomy.blocks))
    for family, density, block in itertools.product(NOTES, ("dense", TENTH), blocks):
        where = Where(block, "residual", anatomy.blocks[block], 0)
        for severity in range(len(SIZES[family])):
            yield _cell(model, dtype, "notes", family, severity, density, where)


def _operators(model: str, dtype: str, anatomy: Anatomy) -> Iterator[Cell]:
    for family, position in itertools.product(FAMILIES, positions(anatomy)):
        if position.operator not in FAMILIES[family].operators:
            continue
        if family in NOTES and position.operator == "residual":
            continue  # `notes` has them at every block
        blocks = list(range(len(anatomy.blocks)))
        random.Random(_hash("blocks", family, position, dtype)).shuffle(blocks)
        turns = itertools.cycle(blocks)
        rare = len(FAMILIES[family].operators) <= 2 and position.outer is None  # few positions: more blocks instead
        for (severity, density), _ in itertools.product(_combinations(family), range(REPEATS if rare else 1)):
            if SIZES[family][severity].get("tensor") == "input" and position.operator not in PRODUCTS:
                continue
            where = position.where(anatomy, next(turns))
            yield _cell(model, dtype, "operators", family, severity, density, where)


def _combinations(family: str) -> Iterator[tuple[int, str]]:
    """Severities x densities: every size dense, the default size at all densities."""
    sizes = range(len(SIZES[family]))
    if family in _WHOLE:
        yield from ((severity, "dense") for severity in sizes)
        return
    densities = ("one", TENTH, "lane") if family in _LANED else ("dense", TENTH, "lane")
    plain = FAMILIES[family].make()
    usual = next((s for s in sizes if make_fault(family, **SIZES[family][s]) == plain), len(SIZES[family]) - 1)
    for severity in sizes:
        yield from ((severity, density) for density in (densities if severity == usual else densities[:1]))


def _cell(model: str, dtype: str, part: str, family: str, severity: int, density: str, where: Where) -> Cell:
    settings = SIZES[family][severity]
    key = _hash(model, dtype, part, json.dumps([family, settings]), density, str(where))
    seed = int(key[:8], 16) % 2**31
    channels = {"dense": None, TENTH: 0.1, "lane": Lanes(32, seed % 32), "one": (seed % 8,)}[density]
    fault = make_fault(family, **settings, channels=channels, seed=seed)
    return Cell(model, dtype, part, int(key[8:16], 16) % PROMPTS, fault, where, density, severity)


def _controls(model: str, dtype: str, count: int) -> list[Cell]:
    drawn = random.Random(_hash("controls", model, dtype)).sample(range(PROMPTS), count)
    return [Cell(model, dtype, "control", prompt) for prompt in drawn]


def _spoken(fault: Fault | None) -> str:
    return "" if fault is None else json.dumps(fault.to_dict(), sort_keys=True)


def _hash(*parts: Any) -> str:
    text = repr([dataclasses.astuple(part) if isinstance(part, Position) else part for part in parts])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
