"""The residual adds of a block, replayed bit for bit.

Pre-norm, post-norm and parallel blocks add different tensors: a block's output, and the input of each norm in it, is
sought among the sums of up to three tensors that its modules gave, or a number that it holds times one (forms.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from noisescope.anatomy import Unit
from noisescope.locators.forms import Block, Form, Forms
from noisescope.locators.products import on_host

OUT = "out"
_MOST_ELEMENTS = 1 << 23  # of one tensor; more rows than that are thinned out


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
    held = [] if block is None else [value for value in vars(block).values() if isinstance(value, float)]
    return sorted(value for value in set(held) if math.isfinite(value) and value not in (0.0, 1.0))


class Residuals(Forms):
    """A form is the roles of the terms of a sum: ((a + b) + c)."""

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
