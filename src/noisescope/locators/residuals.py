"""The residual adds of a block, replayed bit for bit.

Which tensors a block adds is not written down anywhere: pre-norm, post-norm and parallel blocks differ. So the form is
found: a block's output, and the input of each norm in it, is sought among the sums of up to three tensors that its
modules gave. A form that fits in one block is tried in the next. A sum that fits thousands of elements in every bit
can't do so by chance, and a fault in one block can't change the form found in the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescope.anatomy import Unit
from noisescope.locators.floors import Reference
from noisescope.locators.products import Recomputed, on_host

OUT = "out"
_MOST_KEPT = 1024  # rows of a block whose form is not known yet
_SAMPLE = 4  # rows on which a form is tried before it is tried on all
_MOST_ELEMENTS = 1 << 23  # of one tensor; more rows than that are thinned out

Form = tuple[str, ...]  # roles: ((a + b) + c)


@dataclass
class Block:
    """The tensors of one call of a block by role, in the order they were made: "in", "self_attn.o_proj" ..."""

    unit: Unit
    order: int
    terms: dict[str, Tensor] = field(default_factory=dict)  # [rows, width]
    targets: dict[str, Tensor] = field(default_factory=dict)
    known_before: dict[str, int] = field(default_factory=dict)  # target -> how many terms there were

    def kept(self, rows: Tensor) -> Block:
        """Some rows of it, in memory of its own: a form may be known only after later blocks have run."""
        terms, targets = ({role: t[rows] for role, t in kind.items()} for kind in (self.terms, self.targets))
        return Block(self.unit, self.order, terms, targets, self.known_before)


class Recorder:
    """Collects what the modules of the block that runs now are given and give, as it was then: blocks add in place."""

    def __init__(self) -> None:
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
        found = Block(unit, order)

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
        found.targets[OUT], found.known_before[OUT] = rows(y), len(found.terms)
        return found


class Residuals:
    """Finds the forms, and the blocks where they do not hold."""

    def __init__(self) -> None:
        self.forms: dict[str, dict[Form, int]] = {}  # target -> form -> blocks in which it held
        self.checked = 0
        self._pending: list[tuple[Block, str]] = []

    def see(self, block: Block) -> None:
        for target, tensor in block.targets.items():
            self.checked += tensor.numel()
            form = self._holds(block, target)
            if form is not None:
                held = self.forms.setdefault(target, {})
                held[form] = held.get(form, 0) + 1
            else:
                self._pending.append((block.kept(self._rows_off(block, target)), target))

    def _rows_off(self, block: Block, target: str) -> Tensor:
        """Rows worth keeping of a block that fits no form: all if few, else those off a form that fits elsewhere."""
        given = block.targets[target]
        spread = torch.arange(0, len(given), max(1, -(-len(given) // _MOST_KEPT)))
        sums = (_sum(block, target, form) for form in self.forms.get(target, {}))
        for total in (total for total in sums if total is not None and len(given) > _MOST_KEPT):
            off = (total != given).any(-1).nonzero().flatten()[:_MOST_KEPT]
            return torch.tensor(sorted({*off.tolist(), *spread.tolist()}))
        return spread

    def _holds(self, block: Block, target: str) -> Form | None:
        for form in self.forms.get(target, {}):
            if _sum(block, target, form) is not None and _equal(block, target, form, slice(None)):
                return form
        few = slice(None, None, max(1, len(block.targets[target]) // _SAMPLE))
        for form in _candidates(block, target):
            if _equal(block, target, form, few) and _equal(block, target, form, slice(None)):
                return form
        return None

    def failures(self) -> Iterator[tuple[Block, str, Form, Recomputed]]:
        """Blocks in which no form holds, though one holds in at least as many blocks as it fails in."""
        for block, target in self._pending:
            failing = sum(other == target for _, other in self._pending)
            known = {form: n for form, n in self.forms.get(target, {}).items() if n >= failing}
            sums = [(form, _sum(block, target, form)) for form in known]
            tried = [(form, values) for form, values in sums if values is not None]
            if tried:
                y = block.targets[target]
                form, values = min(tried, key=lambda pair: float((y != pair[1]).double().mean()))
                yield block, target, form, Recomputed(y, Reference(values.double(), (), exact=True), total_rows=len(y))

    def unknown(self) -> list[Block]:
        """Blocks whose output is no sum that is known here."""
        failing = {id(block) for block, target, _, _ in self.failures() if target == OUT}
        return [block for block, target in self._pending if target == OUT and id(block) not in failing]

    def next_pass(self) -> None:
        """Forms stay, what failed is forgotten."""
        self._pending.clear()


def _candidates(block: Block, target: str) -> Iterator[Form]:
    """One term, sums of two, sums of three in every order of adding."""
    roles = list(block.terms)[: block.known_before[target]]
    roles = [
        role  # a module that only passes on what another gave is the same term
        for at, role in enumerate(roles)
        if not any(torch.equal(block.terms[role], block.terms[other]) for other in roles[:at])
    ]
    yield from ((role,) for role in roles)
    yield from itertools.combinations(roles, 2)
    for a, b, c in itertools.combinations(roles, 3):
        yield from ((a, b, c), (a, c, b), (b, c, a))


def _sum(block: Block, target: str, form: Form, rows: slice = slice(None)) -> Tensor | None:
    """((a + b) + c) in the device's own dtype; None where a term is not there."""
    if not set(form) <= set(list(block.terms)[: block.known_before[target]]):
        return None
    total = block.terms[form[0]][rows]
    for role in form[1:]:
        total = total + block.terms[role][rows]
    return total if total.dtype == block.targets[target].dtype else None


def _equal(block: Block, target: str, form: Form, rows: slice) -> bool:
    total = _sum(block, target, form, rows)
    given = block.targets[target][rows]
    return total is not None and bool(((total == given) | (total.isnan() & given.isnan())).all())
