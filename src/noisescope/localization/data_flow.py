"""Checks and describes tensors between modules that differ from what the model's code computes.

Also traces NaN and infinity to the first output of a forward that contains any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.call_tree import CallTree, ChoiceCalls, Node, with_whole_modules
from noisescope.localization.error_pattern import Pattern
from noisescope.localization.host_copies import HostStates, tensors_in
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_products import Recomputed
from noisescope.localization.host_twin import HostTwin, autocast_of
from noisescope.localization.roundoff_floors import Reference, number_format
from noisescope.localization.tensors import differing
from noisescope.localization.twin_comparison import Comparison, Difference
from noisescope.model.anatomy import ATTENTION, ROTARY, Anatomy, Unit
from noisescope.probe.watch import watch
from noisescope.sites import FUSED, WHOLE, Site

_MOST_ELEMENTS = 1 << 23  # of a tensor that are judged; more rows than that are thinned out
_PLACES_ONLY = ("tile", "tail", "batch", "rows", "unknown")  # classes that say where, and not what happened
_FUSED_INPUTS = {"0.0": "queries", "0.1": "keys", "0.2": "values", "0.3": "mask"}
# What the two products of attention get, where they are calls of their own: the number of the call, and the path.
_PRODUCT_INPUTS = {(0, "0.0"): "queries", (0, "0.1"): "keys", (1, "0.0"): "probabilities", (1, "0.1"): "values"}
_SHUT = 1e4  # what a mask adds is below the negative of it, in every dtype


@dataclass(frozen=True)
class About:
    """How a wrong tensor should have been computed, and a fault class implied by where it is used."""

    made: str
    hint: Pattern | None = None
    can_be_stale: bool = True  # not of a call that was judged by its own arguments, too, nor of a few small indices

    def refine(self, pattern: Pattern) -> Pattern:
        """Use the hint if the numbers are less specific, or show only which elements are wrong."""
        found = pattern
        less = pattern.fault_class in _PLACES_ONLY
        if self.hint is not None and (less or self.hint.confidence > pattern.confidence):
            told = pattern.text and pattern.fault_class in _PLACES_ONLY[:-1] and self.hint.fault_class != "mask"
            text = f"{self.hint.text}; {pattern.text}" if told else self.hint.text
            found = dataclasses.replace(
                pattern, fault_class=self.hint.fault_class, confidence=self.hint.confidence, text=text
            )
        found.details["made_as"] = self.made
        return found


def about_difference(found: Difference) -> About:
    node, what = found.node, _meaning(found)
    made = f"{what or found.tensor} of {node.module or 'the model'} as {type(found.inside.callee).__name__} computes it"
    if found.inside is node and found.tensor == "input":
        made = f"{found.path} of {node.module or 'the model'} as its caller gave it"
    if found.source is not None:
        made += f", which is the output of {found.source.module}"
    elif found.before is not None and found.before is not node:
        made += f" after {found.before.module}"
    hint = None
    if what == "mask":
        hint = Pattern("mask", 0.97, "attention receives a mask that differs from the one the model's code builds")
    elif what == "positions":
        hint = Pattern("position", 1.0, "the positions differ from those the code counts")
    elif not found.got.is_floating_point():
        hint = Pattern("unknown", 1.0, "the indices differ from those the code selects")
    elif _was_shortened(found):
        name = str(found.got.dtype).removeprefix("torch.")
        hint = Pattern("truncation", 0.8, f"it arrives as {name}, which the code does not cast it to")
    elif what in ("keys", "queries") and _rotated(found):
        hint = Pattern(
            "position", 0.8, f"{what} have the right norm but the wrong direction, as with wrong rotary angles"
        )
    elif what in ("keys", "values") and _facing(found.got, found).shape[-2] > _queries(node):
        hint = Pattern("stale data", 0.7, f"cached {what} differ from what was written")
    return About(made, hint, can_be_stale=found.got.is_floating_point() and what != "positions")


def _meaning(found: Difference) -> str:
    """Whether the tensor holds positions, or is the queries, keys, values or mask of an attention call."""
    node = found.node
    if "mask" in found.path or (node.operator == "softmax" and _mask_differs(found)):
        return "mask"
    if "position_ids" in found.path or (found.tensor == "input" and node.unit.kind == ROTARY):
        return "positions"
    if found.tensor == "input" and node.operator == FUSED:
        return _FUSED_INPUTS.get(found.path, "")
    if found.tensor == "input" and node.operator in ("matmul", "bmm") and node.unit.kind == ATTENTION:
        return _PRODUCT_INPUTS.get((node.occurrence, found.path), "")
    return ""


def _was_shortened(found: Difference) -> bool:
    """Whether the tensor has a shorter dtype than the code gives it, and differs no more than by that rounding."""
    form = number_format(found.got.dtype)
    return form.bits < number_format(found.expected.dtype).bits and bool(
        ((found.got.double() - found.expected.double()).abs() <= 2 * form.ulp(found.expected.double())).all()
    )


def _mask_differs(found: Difference) -> bool:
    """Whether the input of a softmax differs only where one of the two is masked out."""
    off = differing(found.got, found.expected)
    return bool((torch.minimum(found.got, found.expected)[off] < -_SHUT).all())


def _facing(x: Tensor, found: Difference) -> Tensor:
    """Keys with channels in the last dimension: a product receives them transposed."""
    return x.transpose(-1, -2) if found.node.operator in ("matmul", "bmm") and _meaning(found) == "keys" else x


def _queries(node: Node) -> int:
    """How many query tokens an attention call has."""
    query = next((x for _, x in tensors_in((node.args, node.kwargs))), None)
    return 0 if query is None else query.shape[-2]


def _rotated(found: Difference) -> bool:
    """Whether the wrong rows have the correct norm."""
    got, expected = _facing(found.got, found).double(), _facing(found.expected, found).double()
    off = differing(got, expected).any(-1)
    a, b = got.norm(dim=-1)[off], expected.norm(dim=-1)[off]
    return bool(((a - b).abs() <= 0.02 * b).all()) if len(a) else False


def same_difference(one: Difference, other: Difference) -> bool:
    alike = one.tensor == other.tensor == "input" and one.got.shape == other.got.shape
    return alike and torch.equal(one.got, other.got) and torch.equal(one.expected, other.expected)


def as_recomputed(found: Difference) -> Recomputed:
    """The difference as rows and channels; boolean masks and indices as numbers."""
    got, expected = _facing(found.got, found), _facing(found.expected, found).double()
    limit = None if found.limit is None else _facing(found.limit, found)
    lead = tuple(got.shape[:-1])
    if not got.is_floating_point() or got.dtype.itemsize < 2:
        got = got.float()
    if got.dim() == 0:
        got, expected, limit = got[None], expected[None], None if limit is None else limit[None]
    width = got.shape[-1]
    got, expected = got.reshape(-1, width), expected.reshape(-1, width)
    limit = None if limit is None else limit.reshape(-1, width)
    step = max(1, -(-got.numel() // _MOST_ELEMENTS))
    chosen = None
    if step > 1:
        off = differing(got.double(), expected).any(-1).nonzero().flatten()[: _MOST_ELEMENTS // max(1, width)]
        chosen = torch.tensor(sorted({*off.tolist(), *range(0, len(got), step)}))
        got, expected, limit = got[chosen], expected[chosen], None if limit is None else limit[chosen]
    reference = Reference(expected, (), exact=True)
    if limit is not None:
        reference = Reference(expected, (limit / 2,))  # the judge allows twice a bound
    return Recomputed(got, reference, lead=lead, rows=chosen)


# -- blocks alone, for locators that look at nothing else between operators


@dataclass(frozen=True)
class BlockFlow:
    """One call of a block, and what its code computes on the host from its modules' outputs."""

    unit: Unit
    output: Tensor
    differences: tuple[Difference, ...]
    problem: str


def flow_in_blocks(model: nn.Module, anatomy: Anatomy, run: Callable[[], Any]) -> list[BlockFlow]:
    """Every call of a block while `run` runs the model, in call order.

    What is changed between two blocks (a hook on the first) is a difference of the first.
    """
    states, found = HostStates(), list[BlockFlow]()
    tree = CallTree(states)
    everything = with_whole_modules(model, anatomy)
    with watch(model, tree.end, lambda unit, operator: True, before=tree.begin, anatomy=everything), ChoiceCalls(tree):
        run()

    def report(node: Node, compared: Comparison) -> None:
        y = next((x for _, x in tensors_in(node.output)), None)
        if node.operator == "residual" and y is not None and isinstance(node.unit.place, int):
            found.append(BlockFlow(node.unit, y, tuple(compared.differences), compared.problem))
        elif node.operator != "residual":
            for one in compared.differences:
                if one.source is not None and one.source.operator == "residual":
                    found.append(BlockFlow(one.source.unit, one.got[:0], (one,), ""))

    states.settle()
    autocast = autocast_of(model)
    with host_arithmetic():
        for node in tree.nodes:
            around = any(child.operator == "residual" for child in node.children)
            node.by_formula = node.operator != "residual" and not around
        HostTwin(model, autocast).follow(tree.nodes, report)
    return found


# -- NaN and infinity


@dataclass(frozen=True)
class Origin:
    """The first place where NaN or infinity appears."""

    site: Site
    dtype: str
    largest: float  # number of that dtype
    why: str = ""  # what the host found; empty where nothing could be said

    @property
    def overflow(self) -> str:
        return f"an overflow of {self.dtype} (largest value {self.largest:.5g}), not a fault"


class NonFiniteOrigin:
    """Observes the outputs of an audit's forwards for NaN and infinity."""

    def __init__(self) -> None:
        self.origin: Origin | None = None
        self._node: Node | None = None
        self._seen = False  # in this forward

    def next_pass(self) -> None:
        self._seen = False

    def see(self, node: Node) -> None:
        """Check whether a finished call is where they first appear."""
        y = first_floating(node.output)
        if self._seen or y is None or _all_finite(y):
            return
        strange = [x for x in _inputs(node) if not _all_finite(x)]
        if strange and all(map(is_masked, (y, *strange))):  # scores to which a mask was added
            return
        self._seen = True
        if self.origin is not None:
            return
        made_here = not strange
        dtype, largest = str(y.dtype).removeprefix("torch."), number_format(y.dtype).largest
        self.origin = Origin(node.site("output" if made_here else "input"), dtype, largest)
        self._node = node

    def explain(self, calls: Sequence[Node], recomputed: Recomputed) -> None:
        """Explain the origin, if it is among these calls, which the host recomputed as one.

        If that result fits the dtype, the normal check raises the alarm.
        """
        if self.origin is None or self.origin.why or self.origin.site.tensor != "output":
            return
        if not any(node is self._node for node in calls):
            return
        values = recomputed.reference.values[~recomputed.y.isfinite()]
        if not len(values):
            why = "not among the rows the host recomputed: raise rows="
        elif bool(values.isfinite().all()):
            why = f"the host's own result reaches {float(values.abs().max()):.4g}: {self.origin.overflow}"
        else:
            why = "the host's result from the same inputs is not finite either"
        self.origin = dataclasses.replace(self.origin, why=why)

    def compared(self, node: Node, found: Comparison) -> None:
        """Check whether the code that produced the first such tensor does the same on the host."""
        origin, at = self.origin, self._node
        if origin is None or at is None or origin.why:
            return
        input_here = origin.site.tensor == "input" and any(child is at for child in node.children)
        output_here = origin.site.tensor == "output" and node is at
        if (input_here or output_here) and not found.problem:
            tensor = origin.site.tensor
            if not any(each.node is at and each.tensor == tensor for each in found.differences):
                why = f"{origin.overflow}: the host gets the same result from the finite inputs"
                if input_here and all(map(is_masked, _inputs(at))):
                    why = "-inf, as in a mask: the host gets the same result"
                self.origin = dataclasses.replace(origin, why=why)


def first_floating(value: Any) -> Tensor | None:
    return next((x for _, x in tensors_in(value) if x.is_floating_point()), None)


def _inputs(node: Node) -> list[Tensor]:
    """The numeric inputs of a call, without masks, which may contain -inf."""
    given = [x for _, x in tensors_in((node.args, node.kwargs))]
    if node.operator == FUSED:
        return given[:3]
    return given[:1] if node.operator == WHOLE or node.operator == "residual" else given


def is_masked(x: Tensor) -> bool:
    """Whether a tensor has no other non-finite numbers than the -inf of a mask."""
    return _all_finite(x) or bool((x < math.inf).all())


def _all_finite(x: Tensor) -> bool:
    """Whether plain tensors are finite; packed and 8-bit tensors can't be tested."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.dtype.itemsize > 1
    if not plain or not x.numel():
        return True
    total = x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)  # finite only if all are
    return bool(total.isfinite()) or bool(torch.isfinite(x).all())
