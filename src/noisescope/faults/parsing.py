"""Parses faults by name, from JSON, and with their place from one line of text.

    family[:size][,key=value...]@place[/operator[#occurrence][/module]]

    dead_zone:0.3@10                      the output of block 10
    dead_zone:0.3,channels=0.1@10         a tenth of its channels
    stuck_bit:bit=12,value=1@10/linear    every linear of block 10
    gain:0.01@10/linear/*down_proj        one of them
    saturation:0.3@5/matmul#0             the scores (#1: the weighted values)
    accumulation@*/linear                 every linear of the model
    exp_table@5, gain:0.01@lm_head        the operator that the family, or the place, has

Channels are a share (0.1), numbers (3+17) or a lane (every32+5: each 32nd from the 5th).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.faults import families
from noisescope.faults.fault import Fault, Lanes
from noisescope.sites import GROUPS, OUTER_PLACES, Place, canonical_operator, canonical_place


@dataclass(frozen=True)
class Family:
    """A kind of fault: how to create one, which class a locator should report, and which operators it applies to."""

    name: str
    make: type[Fault]  # make() is the fault of default size
    fault_class: str
    sized_by: str | None  # the field that is the size
    default: float | None  # its default
    operators: tuple[str, ...]
    summary: str

    @property
    def at_block_output(self) -> bool:
        return "residual" in self.operators


def _family(make: type[Fault]) -> Family:
    summary = (make.__doc__ or "").partition("\n")[0]
    return Family(make.family, make, make.fault_class, make.sized_by, make().size, make.operators, summary)


FAMILIES: Mapping[str, Family] = {
    kind.family: _family(kind)
    for kind in vars(families).values()  # in the order in which they are defined
    if isinstance(kind, type) and issubclass(kind, Fault) and hasattr(kind, "family")
}


def make_fault(family: str, **fields: Any) -> Fault:
    """Create a fault by its family's name: `make_fault("dead_zone", magnitude=0.3, channels=0.1)`."""
    if family not in FAMILIES:
        raise unknown("fault family", family, FAMILIES)
    make = FAMILIES[family].make
    known = [field.name for field in dataclasses.fields(make)]
    for name in fields:
        if name not in known:
            raise unknown(f"setting of {family}", name, known)
    return make(**fields)


def fault_from_dict(saved: Mapping[str, Any]) -> Fault:
    """The fault that `to_dict` wrote."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("family"), str):
        raise InvalidInput(f'a saved fault must be a JSON object with "family" and its settings, got {saved!r}')
    return make_fault(saved["family"], **{name: value for name, value in saved.items() if name != "family"})


EVERYWHERE = "*"
_FORM = "family[:size][,key=value...]@place[/operator[/module]], such as dead_zone:0.3@10 or gain:0.01@5/linear"
_OUTER_OPERATORS = {"embed": "embedding", "rotary": "matmul", "final_norm": "norm", "lm_head": "linear"}
_LANE = re.compile(r"every(\d+)(?:\+(\d+))?")
_NUMBERS = re.compile(r"\d+(\+\d+)+")
_UNSPEAKABLE = re.compile(r"[@/#\s]")


@dataclass(frozen=True)
class Where:
    """Where a fault sits: place, operator, module (a glob on dotted names) and the n-th such call in the module.

    A block's index alone is the block's output, unless the family acts elsewhere only (exp_table: its softmax).
    Place "*" is the whole model, and "*" for the operator whatever the module computes.
    """

    place: Place
    operator: str | None = None
    module: str | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        if self.place != EVERYWHERE:
            object.__setattr__(self, "place", canonical_place(self.place))
        if isinstance(self.place, int) and self.place < 0:
            raise InvalidInput(f"place {self.place} is negative; blocks are numbered from 0")
        if self.operator is not None:
            object.__setattr__(self, "operator", canonical_operator(self.operator))
        if self.module is not None and (not self.module or _UNSPEAKABLE.search(self.module)):
            raise InvalidInput(f"module must be a dotted name or a pattern such as *down_proj, got {self.module!r}")
        if self.occurrence is not None and (not isinstance(self.occurrence, int) or self.occurrence < 0):
            raise InvalidInput(f"occurrence is the index of a call, from 0; got {self.occurrence!r}")

    def of(self, fault: Fault) -> Where:
        """The same with its operator set; an error if the family does not apply there.

        A module named without an operator means whatever it computes.
        """
        if self.operator is None and self.module is not None:
            return self
        operator = self.operator or _OUTER_OPERATORS.get(str(self.place))
        operator = operator or ("residual" if "residual" in fault.operators else fault.operators[0])
        members = GROUPS[operator][0] if operator in GROUPS else frozenset({operator})
        if not members & set(fault.operators):
            raise InvalidInput(
                f"{fault.family} acts on {', '.join(fault.operators)}, not on {operator}: write "
                f"{fault.family}@{self.place}/{fault.operators[0]}"
            )
        return dataclasses.replace(self, operator=operator)

    def __str__(self) -> str:
        parts = [str(self.place)]
        if self.operator is not None or self.module is not None or self.occurrence is not None:
            nth = "" if self.occurrence is None else f"#{self.occurrence}"
            parts.append(f"{self.operator or EVERYWHERE}{nth}")
        return "/".join([*parts, self.module] if self.module is not None else parts)


def parse_fault(text: str) -> tuple[Fault, Where]:
    """A fault and its place; `fault_text` is the inverse."""
    what, at, where = text.partition("@")
    if not at or not where.strip():
        raise InvalidInput(f"{text!r} does not say where the fault is. The format is {_FORM}")
    return parse_settings(what), parse_where(where)


def parse_settings(text: str) -> Fault:
    """The fault alone: `family[:size][,key=value...]`."""
    family, rest = (part.strip() for part in (*re.split("[:,]", text, maxsplit=1), "")[:2])
    if family not in FAMILIES:
        raise unknown("fault family", family, FAMILIES)
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            sized_by = FAMILIES[family].sized_by
            if sized_by is None:
                raise InvalidInput(f"{family} takes no size, got {part!r}; write its settings as key=value")
            name, value = sized_by, part
        name = name.strip()
        if name in fields:
            raise InvalidInput(f"{name} is given twice in {text!r}")
        fields[name] = _value(value.strip())
    return make_fault(family, **fields)


def parse_where(text: str) -> Where:
    """`place[/operator[#occurrence][/module]]`."""
    place, _, rest = text.strip().partition("/")
    operator, _, module = rest.partition("/")
    operator, hash_, nth = operator.partition("#")
    if hash_ and not nth.isdecimal():
        raise InvalidInput(f"{text!r}: the number of the call within the module must follow #, such as matmul#1")
    at: Place = int(place) if re.fullmatch(r"-?\d+", place) else place
    if isinstance(at, str) and at not in (*OUTER_PLACES, EVERYWHERE):
        raise unknown("place", at, ["a block's index", *OUTER_PLACES, EVERYWHERE])
    return Where(at, None if operator in ("", EVERYWHERE) else operator, module or None, int(nth) if hash_ else None)


def fault_text(fault: Fault, where: Where | None = None) -> str:
    """The text that `parse_fault` reads: what differs from the family's defaults, and the place."""
    plain = FAMILIES[fault.family].make()
    size, settings = "", []
    for field in dataclasses.fields(fault):
        value = getattr(fault, field.name)
        if field.name == fault.sized_by:
            size = f":{_spoken(value)}"
        elif value != getattr(plain, field.name):
            settings.append(f"{field.name}={_spoken(value)}")
    what = fault.family + size
    if settings:
        what += ("," if size else ":") + ",".join(settings)
    return what if where is None else f"{what}@{where}"


def _value(text: str) -> Any:
    """A setting as a value: a number, a word, true or false, none, numbers (3+17) or a lane (every32+5)."""
    lane = _LANE.fullmatch(text)
    if lane:
        return Lanes(int(lane[1]), int(lane[2] or 0))
    if _NUMBERS.fullmatch(text):
        return tuple(int(part) for part in text.split("+"))
    if text.lower() in ("true", "false", "none", "all"):
        return {"true": True, "false": False}.get(text.lower())
    return number_or_text(text)


def number_or_text(text: str) -> int | float | str:
    """A whole number, another number, or the text as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Lanes):
        return f"every{value.period}+{value.offset}"
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return "none" if value is None else str(value)
