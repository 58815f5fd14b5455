"""What lies between operators: each must be given what others before it gave.

Copies and views, the product of gate and up, the parts of a fused projection, queries and keys rotated by position,
keys and values repeated for groups of queries: healthy devices do all of them bit for bit as the host does. Which of
them leads to an operator's input is searched for (expression_search.py). An expression is an operation on slices:

    ("same", slice)    ("product", slice, slice)    ("heads", slice, "half", 3)

A slice is a role and n: the n-th part of that term, as wide as the operation needs it. "heads" are rotated by the
angles (in one of the styles, or "" for not at all) and each repeated so many times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from noisescope.localization.block_wiring import Block, ExpressionSearch, Form
from noisescope.model.anatomy import Unit
from noisescope.sites import Place, Site

Slice = tuple[str, int]

MOST_ROWS = 256  # of a tensor that are compared
_NEAR = 2**-4  # relative: far beyond any format's rounding, and never met by nine of ten unrelated numbers
_COS, _SIN = "cos", "sin"
_WIDE = " in float32"
# x_i rotates with x_(i + D/2), as in Llama, or x_2i with x_(2i+1), as in Cohere; there in float32, and back
_STYLES = tuple(style + width for width in ("", _WIDE) for style in ("half", "pairs"))


class DataFlowChecks(ExpressionSearch):
    """Collects the inputs and outputs of operators in the block that runs now, and finds how they hang together."""

    most_waiting = 4

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[tuple[Place, str], tuple[Site, int]] = {}  # of each input: where, and when in the forward
        self._heads: dict[str, int] = {}  # width of a head, for inputs that have heads
        self.rows = 0  # the most that a tensor had; MOST_ROWS of them are compared
        self._tokens = 0  # in a sequence of this block
        self._now = Block(Unit("", "", 0, "", ()), 0)

    # -- recording

    def begin_block(self) -> None:
        self._now = Block(Unit("", "", 0, "", ()), 0)

    def gave(self, role: str, y: Tensor, *, heads: bool = False) -> None:
        """An operator's output; `heads` where it is [B, H, T, D]."""
        self.rows = max(self.rows, y.shape[:2].numel() if y.dim() == 3 else 0)
        rows = _rows(y, heads=heads or self._by_heads(y))
        if rows is not None:
            self._now.terms[role] = rows

    def got(self, role: str, site: Site, order: int, x: Tensor, *, heads: bool = False) -> None:
        """An operator's input; what is given to the first one of a block is the block's own, or a sum."""
        heads |= self._by_heads(x)
        rows = _rows(x, heads=heads)
        if rows is None or not self._now.terms:
            return
        self._now.targets[role], self._now.known_before[role] = rows, len(self._now.terms)
        self.sites[site.place, role] = (site, order)
        if heads:
            self._heads[role] = x.shape[-1]

    def _by_heads(self, x: Tensor) -> bool:
        """Whether a module works on heads (a norm of queries): known where the tokens lie in the third dimension."""
        if x.dim() == 3 and not self._now.terms:
            self._tokens = x.shape[1]
        return x.dim() == 4 and x.shape[1] != self._tokens == x.shape[2]

    def end_block(self, unit: Unit, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> None:
        """`x` [B, T, C] is the block's input, `angles` cosines and sines [B or 1, T, D] of its positions."""
        now = self._now
        now.unit = unit
        if angles is not None:
            whole = [_rows(angle.expand(len(x), -1, -1), heads=False) for angle in angles]
            rotation = {name: rows for name, rows in zip((_COS, _SIN), whole, strict=True) if rows is not None}
            now.terms = {**rotation, **now.terms}
            now.known_before = {role: count + len(rotation) for role, count in now.known_before.items()}
        self.see(now)
        self.begin_block()

    # -- expressions

    def candidates(self, block: Block, target: str) -> Iterator[Form]:
        given, roles = block.targets[target], [role for role in block.roles(target) if role not in (_COS, _SIN)]
        width, head = given.shape[-1], self._heads.get(target)

        def slices(wide: int) -> list[Slice]:
            fitting = [role for role in roles if len(block.terms[role]) == len(given)]
            return [(role, n) for role in fitting for n in range(block.terms[role].shape[-1] // wide)]

        if head is None:
            yield from (("same", part) for part in slices(width))
            yield from (("product", *pair) for pair in itertools.combinations(slices(width), 2))
            return
        styles = ("", *_STYLES) if _COS in block.terms else ("",)
        for times in (n for n in range(1, width // head + 1) if width % (n * head) == 0):
            for part in slices(width // times):
                yield from (("heads", part, style, times) for style in styles)

    def value(self, block: Block, target: str, form: Form, rows: slice) -> Tensor | None:
        """In the dtype that was given: attention computes in float32 and hands on what it has in sixteen bits."""
        made = self._made(block, target, form, rows)
        return None if made is None else made.to(block.targets[target].dtype)

    def _made(self, block: Block, target: str, form: Form, rows: slice) -> Tensor | None:
        operation, first, *more = form
        width = block.targets[target].shape[-1]
        if operation == "heads":
            style, times = more
            x, head = _slice(block, target, first, width // times, rows), self._heads[target]
            if x is None:
                return None
            x = x.reshape(len(x), -1, head)
            if style:
                cos, sin = (_slice(block, target, (name, 0), None, rows) for name in (_COS, _SIN))
                if cos is None or sin is None or len(cos) != len(x) or cos.shape[-1] > head:
                    return None
                x = _rotated(x, cos, sin, style)
            return x.repeat_interleave(times, 1).flatten(1)
        parts = [_slice(block, target, part, width, rows) for part in (first, *more)]
        if parts[0] is None or operation == "same":
            return parts[0]
        return None if parts[1] is None or len(parts[0]) != len(parts[1]) else parts[0] * parts[1]

    def unexplained(self) -> list[str]:
        """Kinds of inputs for which no expression was found in any block."""
        return list(dict.fromkeys(role for _, role in self.sites if role not in self.forms))

    def nearly(self) -> Iterator[tuple[Site, Form]]:
        """Inputs that nothing gives in every bit in any block, though one comes near: another kernel, or a fault."""
        for block, target in self._waiting:
            if target in self.forms:
                continue
            y = block.targets[target].double()
            wide = replace(block, terms={role: term.double() for role, term in block.terms.items()})
            for form in self.candidates(block, target):
                values = self.value(wide, target, form, slice(None))
                if values is not None and float(((values - y).abs() <= _NEAR * values.abs()).double().mean()) > 0.9:
                    yield self.sites[block.unit.place, target][0], form
                    break


def words(form: Form) -> str:
    """An expression for a reader: "mlp.act_fn x mlp.up_proj"."""
    operation, *parts = form
    if operation == "heads":
        (role, _), style, times = parts
        rotated = ", rotated by its position" if style else ""
        return f"{role}{rotated}" + (f", each head {times} times" if times > 1 else "")
    return " x ".join(role for role, _ in parts)


def _slice(block: Block, target: str, part: Slice, width: int | None, rows: slice) -> Tensor | None:
    """Columns of a term; `width` None for all of them."""
    role, n = part
    if role not in block.terms or role not in block.roles(target):
        return None
    term = block.terms[role][rows]
    if width is None:
        return term
    return term[:, n * width : (n + 1) * width] if (n + 1) * width <= term.shape[-1] else None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """x [R, H, D] by the angles of its rows [R, D' <= D], as x cos + rotate(x) sin."""
    wide = x.float() if style.endswith(_WIDE) else x
    part, rest = wide[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if style.startswith("half"):
        first, second = part.chunk(2, -1)
        across = torch.cat([-second, first], -1)
    else:
        across = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    made = part * cos[:, None] + across * sin[:, None]
    return torch.cat([made.to(x.dtype) if style.endswith(_WIDE) else made, rest], -1)


def _rows(x: Tensor, *, heads: bool) -> Tensor | None:
    """[B, T, ...] or, with heads, [B, H, T, D] as rows [B T, C], a copy on the host of at most MOST_ROWS of them."""
    if not x.is_floating_point() or x.dim() < 2 or x.numel() == 0 or (heads and x.dim() != 4):
        return None
    x = x.detach().transpose(1, 2) if heads else x.detach()
    flat = x.flatten(0, 1).flatten(1) if x.dim() > 2 else x
    return flat[:: max(1, -(-len(flat) // MOST_ROWS))].to("cpu", copy=True)
