"""One forward of the model under test as a tree of calls: every module, and every function that is an operator.

Tensors are copied to the host when a call starts and when it ends, so in-place changes are visible. The host twin
(host_twin.py) is compared with this tree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noisescope.localization.exact_functions import CHOICES
from noisescope.localization.formula_recognition import norm_formula
from noisescope.localization.host_copies import HostStates, copied, tensors_in
from noisescope.localization.resolution import percent_of
from noisescope.localization.tensors import bits_of, on_host
from noisescope.model.anatomy import ATTENTION, EXPERTS, MODULE, ROTARY, ROUTER, Anatomy, Unit
from noisescope.probe.functions import inside_vmap
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import FUSED, WHOLE, Place, Site, place_order

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_KEYS = 1 << 20  # words of a hash that are summed at once


CHOICE = "choice"  # a call of a function that sorts, or chooses the largest

# The operator by which a module that is none itself is named, where its kind has one.
_NAMES = {ATTENTION: FUSED, EXPERTS: "linear", ROUTER: "linear", ROTARY: "matmul"}


@dataclass
class Node:
    """One call, of a module or of a function inside one."""

    unit: Unit
    operator: str
    callee: Any
    order: int  # of the call's beginning among all beginnings and ends of its forward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    occurrence: int = 0
    ended: int = 0
    by_formula: bool = False  # judged as an operator, so that its result is answered for
    phase: str = ""  # of the forward: "prefill 2 x 32 tokens"
    shape: tuple[int, int] | None = None  # sequences and tokens of the forward
    number: int = 0  # of the forward in its audit
    changed: dict[str, Tensor] = field(default_factory=dict)  # arguments that the call has written to, as they are then
    passed: dict[str, str] = field(default_factory=dict)  # outputs that are arguments themselves, and which
    cast: torch.dtype | None = None  # that autocast gave to products when the call began

    @property
    def is_module(self) -> bool:
        return isinstance(self.callee, nn.Module)

    @property
    def autocast(self) -> bool:
        return self.cast is not None

    @property
    def autocast_inside(self) -> bool:
        """Whether it was on in the call's code. It casts by kind of device, so the host's code may not cast alike."""
        return self.autocast or any(child.autocast for child in self.children)

    @property
    def module(self) -> str:
        return self.unit.module

    @property
    def first_place(self) -> Place:
        """Where what a call receives is used first: a model that holds the blocks starts at the embedding."""
        return min((child.first_place for child in self.children), default=self.unit.place, key=place_order)

    def site(self, tensor: str) -> Site:
        operator = self.operator
        if operator in (WHOLE, CHOICE):
            operator = _NAMES.get(self.unit.kind, "residual")
        found = self.unit.site(operator, tensor=tensor, occurrence=self.occurrence)
        outside = tensor == "input" and not isinstance(found.place, int)
        return dataclasses.replace(found, place=self.first_place) if outside else found


class CallTree:
    """Collects the nodes of one forward from the callbacks of `watch` before and after each call."""

    def __init__(self, states: HostStates, phase: str = "", number: int = 0) -> None:
        self._phase, self._number = phase, number
        self._shape: tuple[int, int] | None = None
        self.nodes: list[Node] = []  # in the order in which they ended
        self._open: list[Node] = []
        self._versions: list[dict[str, int]] = []  # of the arguments of each open call
        self._events = 0
        self._states = states

    @property
    def root(self) -> Node:
        """The call of the model itself, which ends last."""
        return self.nodes[-1]

    @property
    def running(self) -> Node:
        """The innermost call that has started but not ended."""
        return self._open[-1]

    def begin(self, call: RecordedCall) -> None:
        args, kwargs = self._states.on_host((call.args, call.kwargs))
        parent = self._open[-1] if self._open else None
        unit = call.unit
        if parent is not None and not isinstance(call.callee, nn.Module):  # the innermost module calls a function
            unit = dataclasses.replace(unit, module=parent.module)
        node = Node(unit, call.operator, call.callee, self._events, args, kwargs, parent=parent)
        if parent is None:
            main = next((x for _, x in tensors_in((args, kwargs)) if x.dim() > 1), None)
            self._shape = None if main is None else (main.shape[0], main.shape[1])
        node.occurrence, node.phase, node.shape = call.occurrence, self._phase, self._shape
        node.number, node.cast = self._number, _cast(call)
        if parent is not None:
            parent.children.append(node)
        self._open.append(node)
        self._versions.append({path: _version(x) for path, x in tensors_in((call.args, call.kwargs))})
        self._events += 1

    def chosen(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record a choice made by the code of the running module."""
        if not self._open or inside_vmap():
            return
        parent = self._open[-1]
        with torch._C.DisableTorchFunction():
            given, named, result = self._states.on_host((args, kwargs, output))
        node = Node(parent.unit, CHOICE, function, self._events, given, named, result, parent)
        node.phase, node.shape, node.ended = self._phase, self._shape, self._events
        parent.children.append(node)
        self.nodes.append(node)
        self._events += 1

    def end(self, call: RecordedCall) -> None:
        node = self._open.pop()
        node.output, node.ended = self._states.on_host(call.output), self._events
        before = self._versions.pop()
        given = {id(x): path for path, x in tensors_in((call.args, call.kwargs))}
        node.passed = {path: given[id(x)] for path, x in tensors_in(call.output) if id(x) in given}
        for path, x in tensors_in((call.args, call.kwargs)):
            if _version(x) != before.get(path):
                node.changed[path] = copied(x)
        self.nodes.append(node)
        self._events += 1


class ChoiceCalls(TorchFunctionMode):
    """Records sort and top-k calls in a tree: devices may order equal numbers differently."""

    def __init__(self, tree: CallTree) -> None:
        super().__init__()
        self._tree = tree

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in CHOICES:
            self._tree.chosen(func, args, kwargs or {}, result)
        return result


def _cast(call: RecordedCall) -> torch.dtype | None:
    kinds = {x.device.type for _, x in tensors_in((call.args, call.kwargs))} - {"meta"}
    return next((torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)), None)


def _version(x: Tensor) -> int:
    """How often a tensor was written to; inference-mode tensors do not count writes."""
    return 0 if x.is_inference() else x._version


def can_be_stacked(node: Node) -> bool:
    """Whether calls of this operator can be checked as one: the module must treat all rows of one tensor alike."""
    if not node.is_module or node.operator not in ("linear", "norm", "silu", "gelu", "embedding"):
        return False
    plain = len(node.args) == 1 and not node.kwargs and isinstance(node.output, Tensor)
    if not plain or not isinstance(node.args[0], Tensor):
        return False
    x, y = node.args[0], node.output
    return x.shape == y.shape[:-1] if node.operator == "embedding" else x.dim() > 1 and x.shape[:-1] == y.shape[:-1]


def stacked(nodes: list[Node]) -> Node:
    """Several calls of one module merged into one, row after row."""
    first = nodes[0]
    x = [node.args[0] if node.operator == "embedding" else node.args[0].flatten(0, -2) for node in nodes]
    rows = torch.cat([each.flatten() for each in x] if first.operator == "embedding" else x)
    output = torch.cat([node.output.flatten(0, -2) for node in nodes])
    return dataclasses.replace(first, args=(rows,), kwargs={}, output=output)


def with_whole_modules(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """The anatomy with every module that is not an operator added as a unit, so that its calls are reported.

    A norm is an operator whatever its class is called: here its formula can be told from its code.
    """
    places: dict[str, Place] = {}
    kinds: dict[str, str] = {}
    for unit in anatomy.units:
        places[unit.module] = unit.place
        if unit.kind != MODULE:
            kinds[unit.module] = unit.kind
    operators = {unit.module for unit in anatomy.units if unit.kind == MODULE}
    blocks = dict(zip(anatomy.blocks, range(len(anatomy.blocks)), strict=True))
    units = []
    outside: Place = "embed"  # of what is neither a block nor around operators, before the first block
    for name, module in model.named_modules():
        if name in blocks:
            outside = "lm_head"
        if name in operators or isinstance(module, _CONTAINERS):
            continue
        place = places.get(name, _place(name, blocks, places, outside))
        if _is_norm(module):
            units.append(Unit(name, MODULE, "final_norm" if place == "lm_head" else place, "", ("norm",)))
        else:
            units.append(Unit(name, kinds.get(name, MODULE), place, "", (WHOLE,)))
    return dataclasses.replace(anatomy, units=(*anatomy.units, *units))


def _is_norm(module: nn.Module) -> bool:
    own = [p for p in module._parameters.values() if p is not None]
    alone = not any(True for _ in module.children())
    return alone and bool(own) and own[0].dim() == 1 and norm_formula(module, len(own[0])) is not None


def _place(name: str, blocks: dict[str, int], places: dict[str, Place], outside: Place) -> Place:
    """The block that contains a module; outside the blocks, the last place in data order that the module contains."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        block = blocks.get(".".join(parts[:length]))
        if block is not None:
            return block
    inside = [place for unit, place in places.items() if not name or unit.startswith(f"{name}.")]
    return max(inside, key=place_order, default=outside)


class Judged:
    """Which modules and calls were checked, and why others were not."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.reasons: dict[str, dict[str, str]] = {}  # module -> phase -> why a call of it was not judged
        self.not_finite: dict[str, dict[str, float]] = {}  # phase -> module -> share of its output
        self.calls: dict[tuple[Site, str], float] = {}  # site and phase, and the share of the output
        self.work: dict[tuple[Site, str], float] = {}  # multiply-adds of each

    def add(self, node: Node, *, not_finite: float = 0.0) -> None:
        """Count a call of which all but a share of the output was checked, where the host has NaN or infinity too."""
        if not_finite and node.is_module:
            self.not_finite.setdefault(node.phase, {})[node.module] = not_finite
        elif node.is_module:
            self.modules.add(node.module)
            if node.phase in self.reasons.get(node.module, {}):  # no formula, but its code could be run
                del self.reasons[node.module][node.phase]
        self._count(node, 1 - not_finite)

    def unknown(self, node: Node, reason: str) -> None:
        if node.is_module:
            self.reasons.setdefault(node.module, {})[node.phase] = reason
        self._count(node, 0.0)

    @property
    def called(self) -> set[str]:
        return self.modules.union(self.reasons, *self.not_finite.values())

    def reason(self, module: str) -> str:
        """Why a module was not checked, or not in every phase; "" if it was, be it with NaN in some phases."""
        found = self.reasons.get(module)
        if not found and module not in self.modules:
            found = {
                phase: f"{percent_of(shares[module])} of its output is NaN or infinite, on the host as well"
                for phase, shares in self.not_finite.items()
                if module in shares
            }
        if not found:
            return ""
        phase, why = next(iter(found.items()))
        return why if module not in self.modules else f"in {phase}: {why}"

    def _count(self, node: Node, share: float) -> None:
        key = (node.site("output"), node.phase)
        self.calls[key] = share
        self.work[key] = multiply_adds(node)


def multiply_adds(node: Node) -> float:
    """Multiply-adds of a linear, of the products inside attention, or of a fused attention call."""
    y = node.output
    if not isinstance(y, Tensor) or node.operator not in ("linear", "matmul", "bmm", FUSED):
        return 0.0
    given = [x for _, x in tensors_in((node.args, node.kwargs))]
    if not given or not given[0].dim():
        return 0.0
    if node.operator == FUSED:
        keys = given[1].shape[-2] if len(given) > 1 else 0
        return 2.0 * y.numel() * keys
    return float(y.numel() * given[0].shape[-1])


@dataclass(frozen=True)
class CallHash:
    """A call identified by hashes of its bits: the same inputs must give the same output."""

    given: tuple[int, ...]
    output: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, node: Node) -> CallHash:
        given = [x for _, x in tensors_in((node.args, node.kwargs))]
        return cls(hashed(given), hashed([node.output]), weight_sums(node.callee))


def weight_sums(callee: Any) -> tuple[int, ...]:
    """Sums of the bits of a module's own parameters, computed on their device."""
    own = callee._parameters.values() if isinstance(callee, nn.Module) else ()
    plain = [p.detach() for p in own if type(p) is nn.Parameter and not p.is_meta]
    return tuple(int(_words(p, torch.int64).sum(dtype=torch.int64)) for p in plain)


def _words(x: Tensor, word: torch.dtype) -> Tensor:
    """The bits of a tensor, as words of this size if its own allows: their sums wrap around but still show a change."""
    flat, size = x.flatten(), word.itemsize
    whole = flat.nbytes % size == 0 == flat.storage_offset() * flat.itemsize % size
    return flat.view(word) if whole else bits_of(flat)


def hashed(values: Iterable[Tensor]) -> tuple[int, ...]:
    """For each tensor, the sum of its bits, 32 at a time, times random numbers: two that differ agree by 2^-33 at most.

    A product in torch, since hashlib takes a second for a gigabyte, and logits alone may have several.
    """
    plain = [on_host(value) for value in values if type(value) in (Tensor, nn.Parameter)]
    return tuple(_keyed_sum(_words(x, torch.int32)) for x in plain)


def _keyed_sum(words: Tensor) -> int:
    total = 0
    for start in range(0, len(words), _KEYS):
        part = words[start : start + _KEYS]
        total += (start + 1) * int((part * _keys()[: len(part)]).sum())
    return total


@functools.cache
def _keys() -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0x5EED)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (_KEYS,), generator=generator, device="cpu")
