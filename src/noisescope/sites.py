"""noisescope's terms as values: operator, group, place, site. Does not import torch.

An operator is what is computed (`linear`, `softmax` ...), a place is where in the model (a block's index, or `embed`,
`rotary`, `final_norm`, `lm_head`), a site is both with the module's name, the tensor and the phase.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from noisescope.errors import unknown

Place = int | str
OuterPlace = Literal["embed", "rotary", "final_norm", "lm_head"]
NamedPlace = int | OuterPlace  # a place as reports have it, every name checked

OPERATORS = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm", "embedding", "residual")
CACHED = ("keys", "values")  # what attention reads of every token, keys after rotation: a KV cache stores these
FUSED = "attention"  # a fused attention call as a whole, where it is reported by itself; as a group it is another thing
WHOLE = "module"  # a call of a module that is not an operator, reported as a whole
ELEMENTWISE = "elementwise"  # adds, products, casts and copies, where a device gets them wrong wherever they occur
DEVICE = "device"  # the place of such a fault; nothing can be injected there
OUTER_PLACES: tuple[OuterPlace, ...] = ("embed", "rotary", "final_norm", "lm_head")
TENSORS = ("output", "input", "weight")
PHASES = ("forward", "backward")

ALIASES = {
    "layernorm": "norm",
    "layer_norm": "norm",
    "rmsnorm": "norm",
    "rms_norm": "norm",
    "swish": "silu",
    "embed": "embedding",
    "fc": "linear",
    "dense": "linear",
    "kv-cache": "kv_cache",
}

# A group is operators within a component of a block; component None means anywhere.
GROUPS: dict[str, tuple[frozenset[str], str | None]] = {
    "gemm": (frozenset({"linear", "matmul", "bmm"}), None),
    "attention": (frozenset({"matmul", "bmm", "softmax"}), "attention"),
    "mlp": (frozenset({"linear", "matmul", "bmm", "silu", "gelu"}), "mlp"),
    "kv_cache": (frozenset(CACHED), "attention"),
}


def canonical_operator(name: str) -> str:
    """The one printed name of an operator or group: `canonical_operator("RMS_Norm") == "norm"`."""
    key = str(name).strip().lower()
    key = ALIASES.get(key, key)
    if key not in OPERATORS and key not in CACHED and key not in GROUPS:
        raise unknown("operator", name, [*OPERATORS, *CACHED, *GROUPS, *ALIASES])
    return key


def canonical_place(place: Place) -> NamedPlace:
    """A block's index as int, or one of the outer places by name."""
    if isinstance(place, bool) or not isinstance(place, (int, str)):
        raise unknown("place", place, ["a block's index", *OUTER_PLACES])
    if isinstance(place, int):
        return place
    for name in OUTER_PLACES:
        if place == name:
            return name
    raise unknown("place", place, ["a block's index", *OUTER_PLACES])


def place_order(place: Place) -> tuple[int, str]:
    """Sort key in the order data flows: the device itself, embed, rotary, blocks, final_norm, lm_head."""
    if isinstance(place, int):
        return (2 + place, "")
    return ({DEVICE: -1, "embed": 0, "rotary": 1}.get(place, 10**9), place)


def place_ranges(places: Iterable[Place]) -> str:
    """Places in a few characters.

    >>> place_ranges([0, 1, 2, 5, "lm_head"])
    '0-2, 5, lm_head'
    """
    runs: list[list[Place]] = []
    for place in places:
        if runs and isinstance(place, int) and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True)
class Site:
    """Where a perturbation is applied: a value, never a string to parse."""

    operator: str
    place: Place
    module: str  # dotted name inside the model
    component: str = ""  # "attention", "mlp", "router" or ""
    tensor: str = "output"
    phase: str = "forward"
    occurrence: int = 0  # the n-th such call inside one call of the module (0 = QK^T, 1 = PV)

    def key(self, seed: int) -> int:
        """The odd 64-bit multiplier of this (seed, site), for the row hash.

        The parts are hashed, so a new site or another order of calls never shifts what a site draws.
        """
        text = repr((seed, self.operator, self.place, self.module, self.tensor, self.phase, self.occurrence))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True) | 1

    def facts(self) -> dict[str, Place]:
        """What names an operator's output, for JSON."""
        return {name: vars(self)[name] for name in ("operator", "place", "module", "component", "occurrence")}

    def __str__(self) -> str:
        if self.place == DEVICE:
            return f"{self.module} on the device"
        where = f"block {self.place}" if isinstance(self.place, int) else self.place
        if self.phase == "backward":
            return f"backward of {self.operator} at {where} ({self.module}): {self.tensor} gradient"
        part = "" if self.tensor == "output" else f"{self.tensor} of "
        return f"{part}{self.operator} at {where} ({self.module})"


def matches_operator(wanted: Iterable[str] | None, operator: str, component: str) -> bool:
    """Whether an operator in a component is among the wanted operators and groups.

    None means all that compute something: keys and values are stored, and have to be named.
    """
    if wanted is None:
        return operator not in CACHED
    for name in wanted:
        if name in GROUPS:
            members, within = GROUPS[name]
            if operator in members and (within is None or within == component):
                return True
        elif name == operator:
            return True
    return False
