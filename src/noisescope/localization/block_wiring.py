"""How tensors inside a block are made of others: the expression is searched for, then checked in every block.

Which tensors a block adds, multiplies or rotates is not written down anywhere, and differs between architectures. So an
expression is sought that gives a tensor in every bit. One that fits in one block is tried in the next. What fits
thousands of elements in every bit can't do so by chance, and a fault in one block can't change what others show.

Residual sums: pre-norm, post-norm and parallel blocks add different tensors. A block's output, and the input of each
norm in it, is sought among the sums of up to three tensors that its modules gave, or a number that it holds times one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.host_products import Recomputed
from noisescope.localization.roundoff_floors import Reference
from noisescope.localization.tensors import on_host, same_numbers
from noisescope.model.anatomy import Anatomy, Unit
from noisescope.sites import Place

OUT = "out"
PART = "part"  # a module inside a block that is no operator: watched only for what the block adds up
_MOST_KEPT = 1024  # rows of a block whose expression is not known yet
_USUAL = 3  # blocks that make an expression the usual one, so that a single other block is worth a note
_SAMPLE = 4  # rows on which an expression is tried before it is tried on all
_MOST_ELEMENTS = 1 << 23  # of one tensor; more rows than that are thinned out

Form = tuple[Any, ...]  # an expression: hashable; what it means is its search's own


@dataclass
class Block:
    """The tensors of one call of a block by role: `terms` in the order they were made, `targets` made of them."""

    unit: Unit
    order: int
    terms: dict[str, Tensor] = field(default_factory=dict)  # [rows, width]
    targets: dict[str, Tensor] = field(default_factory=dict)
    known_before: dict[str, int] = field(default_factory=dict)  # target -> how many terms there were

    def roles(self, target: str) -> list[str]:
        """Terms that there were before a target."""
        return list(self.terms)[: self.known_before[target]]

    def informative(self, target: str) -> bool:
        """Whether there is something to learn: what is NaN throughout, and made of NaN, fits everything."""
        made = bool(self.targets[target].isfinite().any())
        return made or all(bool(self.terms[role].isfinite().all()) for role in self.roles(target))

    def kept(self, target: str, rows: Tensor) -> Block:
        """Some rows of a target and its terms, in memory of their own: later blocks may show its expression."""
        given, roles = self.targets[target], self.roles(target)
        terms = {role: self.terms[role][rows] for role in roles if len(self.terms[role]) == len(given)}
        return Block(self.unit, self.order, terms, {target: given[rows]}, {target: len(terms)})


class ExpressionSearch:
    """Finds the expressions, and the blocks where they do not hold."""

    most_waiting: float = math.inf  # blocks that are kept in which a target fits no expression

    def __init__(self) -> None:
        self.forms: dict[str, dict[Form, set[Place]]] = {}  # target -> expression -> blocks in which it holds
        self._waiting: list[tuple[Block, str]] = []
        self._failed: dict[str, set[Place]] = {}  # target -> blocks in which none holds
        self._founders: dict[tuple[str, Form], Block] = {}  # in which it was seen for the first time

    def candidates(self, block: Block, target: str) -> Iterator[Form]:
        """Every expression that is worth a try."""
        raise NotImplementedError

    def value(self, block: Block, target: str, form: Form, rows: slice) -> Tensor | None:
        """What it gives on these rows, in the device's own dtype; None where the block does not have its terms."""
        raise NotImplementedError

    def see(self, block: Block) -> None:
        for target in filter(block.informative, block.targets):
            form = self._holds(block, target)
            if form is not None:
                places = self.forms.setdefault(target, {})
                if form not in places:
                    self._founders[target, form] = block.kept(target, self._rows_off(block, target))
                places.setdefault(form, set()).add(block.unit.place)
                continue
            failed = self._failed.setdefault(target, set())
            failed.add(block.unit.place)
            if len(failed) <= self.most_waiting:
                self._waiting.append((block.kept(target, self._rows_off(block, target)), target))

    def _rows_off(self, block: Block, target: str) -> Tensor:
        """Rows worth keeping of a block that fits none: all if few, else those off what fits elsewhere."""
        given = block.targets[target]
        spread = torch.arange(0, len(given), max(1, -(-len(given) // _MOST_KEPT)))
        found = (self.value(block, target, form, slice(None)) for form in self.forms.get(target, {}))
        for values in (values for values in found if values is not None and len(given) > _MOST_KEPT):
            off = (values != given).any(-1).nonzero().flatten()[:_MOST_KEPT]
            return torch.tensor(sorted({*off.tolist(), *spread.tolist()}))
        return spread

    def _holds(self, block: Block, target: str) -> Form | None:
        few = slice(None, None, max(1, len(block.targets[target]) // _SAMPLE))
        known = self.forms.get(target, {})
        for form in known:
            if self._equal(block, target, form, slice(None)):
                return form
        for form in self.candidates(block, target):
            if self._equal(block, target, form, few) and self._equal(block, target, form, slice(None)):
                return form
        return None

    def _equal(self, block: Block, target: str, form: Form, rows: slice) -> bool:
        values, given = self.value(block, target, form, rows), block.targets[target][rows]
        return values is not None and values.dtype == given.dtype and same_numbers(values, given)

    def failures(self) -> Iterator[tuple[Block, str, Form, Recomputed]]:
        """Blocks in which none holds, though one holds in at least as many blocks as it fails in."""
        for block, target in self._waiting:
            forms, y = self.forms.get(target, {}), block.targets[target]
            known = [form for form, places in forms.items() if len(places) >= len(self._failed[target])]
            found = [(form, self.value(block, target, form, slice(None))) for form in known]
            tried = [(form, v) for form, v in found if v is not None and v.dtype == y.dtype and v.shape == y.shape]
            if tried:
                form, values = min(tried, key=lambda pair: float((y != pair[1]).double().mean()))
                yield block, target, form, Recomputed(y, Reference(values.double(), (), exact=True))

    def odd(self) -> Iterator[tuple[Block, str, Form, Form]]:
        """Blocks that are made as no other one is, with that expression and the usual one, whose terms they have."""
        for (target, form), block in self._founders.items():
            places = self.forms[target]
            usual = max(places, key=lambda other: len(places[other]))
            alone = len(places[form]) == 1 and len(places[usual]) >= _USUAL
            has_terms = alone and self.value(block, target, usual, slice(None)) is not None
            if has_terms and not self._equal(block, target, usual, slice(None)):
                yield block, target, form, usual

    def matched(self, target: str, place: Place) -> bool:
        """Whether an expression gave this target of a block in every bit."""
        return any(place in places for places in self.forms.get(target, {}).values())

    def next_pass(self) -> None:
        """Expressions stay, what failed is forgotten."""
        self._waiting.clear()
        self._failed.clear()
        self._founders.clear()


def inner_modules(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[int, str, nn.Module]]:
    """Modules with weights inside each block (not lists of modules): (index of the block, name, module)."""
    modules = dict(model.named_modules())
    for place, block in enumerate(anatomy.blocks):
        for name, module in modules[block].named_modules(prefix=block) if block in modules else ():
            inner = name != block and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if inner and any(True for _ in module.parameters()):
                yield place, name, module


class Recorder:
    """Collects what the modules of the block that runs now are given and give, as it was then: blocks add in place."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules = {} if model is None else dict(model.named_modules())
        self._events: list[tuple[str, Tensor, bool]] = []  # module, tensor, whether it was given to the module

    def clear(self) -> None:
        self._events.clear()

    def gave(self, module: str, y: Tensor) -> None:
        self._events.append((module, y.detach().clone(), False))

    def got(self, module: str, x: Tensor) -> None:
        self._events.append((module, x.detach().clone(), True))

    def block(self, unit: Unit, order: int, x: Tensor, y: Tensor) -> Block:
        """The block that has just run, from x to y."""
        width, size = y.shape[-1], y.numel()
        step = max(1, -(-size // _MOST_ELEMENTS))
        found, factors = Block(unit, order), _factors(self._modules.get(unit.module))

        def rows(tensor: Tensor) -> Tensor:
            return on_host(tensor.reshape(-1, width)[::step])

        if x.shape[-1:] == (width,) and x.numel() == size:
            found.terms["in"] = rows(x)
        for module, tensor, given in self._events:
            fits = tensor.shape[-1:] == (width,) and tensor.numel() == size
            if not fits or not module.startswith(f"{unit.module}."):
                continue
            role = module.removeprefix(f"{unit.module}.") + (".in" if given else "")
            if given:  # to a norm: a sum itself, and a term of what follows
                found.targets[role], found.known_before[role] = rows(tensor), len(found.terms)
            found.terms[role] = rows(tensor)
            found.terms |= {f"{factor} x {role}": found.terms[role] * factor for factor in factors}
        found.targets[OUT], found.known_before[OUT] = rows(y), len(found.terms)
        return found


def _factors(block: nn.Module | None) -> list[float]:
    """Numbers that a block holds and may multiply by before it adds, as Granite's residual_multiplier."""
    numbers = [] if block is None else [value for value in vars(block).values() if isinstance(value, float)]
    return sorted(value for value in set(numbers) if math.isfinite(value) and value not in (0.0, 1.0))


class Residuals(ExpressionSearch):
    """An expression is the roles of the terms of a sum: ((a + b) + c)."""

    def unknown(self) -> list[Block]:
        """Blocks whose output is no sum that is known here."""
        failing = {id(block) for block, target, _, _ in self.failures() if target == OUT}
        return [block for block, target in self._waiting if target == OUT and id(block) not in failing]

    def candidates(self, block: Block, target: str) -> Iterator[Form]:
        """One term, sums of two, sums of three in every order of adding."""
        roles = block.roles(target)
        roles = [
            role  # a module that only passes on what another gave is the same term
            for at, role in enumerate(roles)
            if not any(torch.equal(block.terms[role], block.terms[other]) for other in roles[:at])
        ]
        yield from ((role,) for role in roles)
        yield from itertools.combinations(roles, 2)
        for a, b, c in itertools.combinations(roles, 3):
            yield from ((a, b, c), (a, c, b), (b, c, a))

    def value(self, block: Block, target: str, form: Form, rows: slice) -> Tensor | None:
        if not set(form) <= set(block.roles(target)):
            return None
        total = block.terms[form[0]][rows]
        for role in form[1:]:
            total = total + block.terms[role][rows]
        return total
