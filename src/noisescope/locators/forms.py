"""How tensors inside a block are made of others, found rather than known, and held against every block.

Which tensors a block adds, multiplies or turns is not written down anywhere, and differs between architectures. So a
form is sought that gives a tensor in every bit. A form that fits in one block is tried in the next. What fits thousands
of elements in every bit can't do so by chance, and a fault in one block can't change the form found in the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noisescope.anatomy import Unit
from noisescope.locators.floors import Reference
from noisescope.locators.products import Recomputed
from noisescope.sites import Place

_MOST_KEPT = 1024  # rows of a block whose form is not known yet
_USUAL = 3  # blocks that make a form the usual one, so that a single other block is worth a word
_SAMPLE = 4  # rows on which a form is tried before it is tried on all

Form = tuple[Any, ...]  # hashable; what it means is its kind's own


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

    def tells(self, target: str) -> bool:
        """Whether there is something to learn: what is NaN throughout, and made of NaN, fits every form."""
        made = bool(self.targets[target].isfinite().any())
        return made or all(bool(self.terms[role].isfinite().all()) for role in self.roles(target))

    def kept(self, target: str, rows: Tensor) -> Block:
        """Some rows of a target and its terms, in memory of their own: later blocks may show its form."""
        given, roles = self.targets[target], self.roles(target)
        terms = {role: self.terms[role][rows] for role in roles if len(self.terms[role]) == len(given)}
        return Block(self.unit, self.order, terms, {target: given[rows]}, {target: len(terms)})


class Forms:
    """Finds the forms, and the blocks where they do not hold."""

    most_waiting: float = math.inf  # blocks that are kept in which a target fits no form

    def __init__(self) -> None:
        self.forms: dict[str, dict[Form, set[Place]]] = {}  # target -> form -> blocks in which it held
        self._waiting: list[tuple[Block, str]] = []
        self._failed: dict[str, set[Place]] = {}  # target -> blocks in which no form held
        self._founders: dict[tuple[str, Form], Block] = {}  # in which a form was seen for the first time

    def candidates(self, block: Block, target: str) -> Iterator[Form]:
        """Every form that is worth a try."""
        raise NotImplementedError

    def value(self, block: Block, target: str, form: Form, rows: slice) -> Tensor | None:
        """What a form gives on these rows, in the device's own dtype; None where the block does not have its terms."""
        raise NotImplementedError

    def see(self, block: Block) -> None:
        for target in filter(block.tells, block.targets):
            form = self._holds(block, target)
            if form is not None:
                held = self.forms.setdefault(target, {})
                if form not in held:
                    self._founders[target, form] = block.kept(target, self._rows_off(block, target))
                held.setdefault(form, set()).add(block.unit.place)
                continue
            failed = self._failed.setdefault(target, set())
            failed.add(block.unit.place)
            if len(failed) <= self.most_waiting:
                self._waiting.append((block.kept(target, self._rows_off(block, target)), target))

    def _rows_off(self, block: Block, target: str) -> Tensor:
        """Rows worth keeping of a block that fits no form: all if few, else those off a form that fits elsewhere."""
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
        if values is None or values.dtype != given.dtype or values.shape != given.shape:
            return False
        return bool(((values == given) | (values.isnan() & given.isnan())).all())

    def failures(self) -> Iterator[tuple[Block, str, Form, Recomputed]]:
        """Blocks in which no form holds, though one holds in at least as many blocks as it fails in."""
        for block, target in self._waiting:
            forms, y = self.forms.get(target, {}), block.targets[target]
            known = [form for form, held in forms.items() if len(held) >= len(self._failed[target])]
            found = [(form, self.value(block, target, form, slice(None))) for form in known]
            tried = [(form, v) for form, v in found if v is not None and v.dtype == y.dtype and v.shape == y.shape]
            if tried:
                form, values = min(tried, key=lambda pair: float((y != pair[1]).double().mean()))
                yield block, target, form, Recomputed(y, Reference(values.double(), (), exact=True), total_rows=len(y))

    def odd(self) -> Iterator[tuple[Block, str, Form, Form]]:
        """Blocks that are made as no other one is, with that form and the usual one, which they have the terms for."""
        for (target, form), block in self._founders.items():
            held = self.forms[target]
            usual = max(held, key=lambda other: len(held[other]))
            alone = len(held[form]) == 1 and len(held[usual]) >= _USUAL
            has_terms = alone and self.value(block, target, usual, slice(None)) is not None
            if has_terms and not self._equal(block, target, usual, slice(None)):
                yield block, target, form, usual

    def held(self, target: str, place: Place) -> bool:
        """Whether a form gave this target of a block in every bit."""
        return any(place in places for places in self.forms.get(target, {}).values())

    def next_pass(self) -> None:
        """Forms stay, what failed is forgotten."""
        self._waiting.clear()
        self._failed.clear()
        self._founders.clear()
