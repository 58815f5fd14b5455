"""Runs the model's own code under autograd on the host, to compute the gradients it must return.

A module's code runs with the device's recorded results in place of the calls it makes. The leaves of its graph are the
module's inputs, the results of its calls and the parameters it reads; the roots are what it passed to its calls and
what it returned. The gradients recorded at the roots go in, and those at the leaves must match what the device
recorded. Autograd on the host thus differentiates sums over several uses, rotations, masks, products and whole norms,
in float64 from the device's values. Tolerances come from runs with random rounding (gradient_rounding.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from noisescope.localization.call_tree import Node
from noisescope.localization.gradient_calls import INPUT, OUTPUT, GradientCalls, without_checkpointing
from noisescope.localization.gradient_rounding import Expected, KeepFloat64, RoundingMode, expected_gradients
from noisescope.localization.host_copies import mapped, own_state, set_state, tensors_in
from noisescope.localization.host_twin import HostTwin, _alike_call, _code_of, _Run
from noisescope.localization.tensors import rms
from noisescope.probe.functions import operators_within
from noisescope.sites import FUSED

WEIGHT = "weight"
Leaf = tuple[str, int, str]  # INPUT, -1, path | OUTPUT, which call, path | WEIGHT, id of the parameter, ""
# Limits of this share of a gradient say nothing, unless the gradient cancels to round-off, which then shows in a plain
# run too: in one that is this near to float64, runs that round at random have gone another way.
_COARSE, _NEAR = 1.0, 0.02
_MOST_PARAMETERS = 1 << 26  # elements that a module's code may read directly: they are widened on the host


class NotDifferentiated(Exception):
    """A module whose code could not run, or returned something different from the device, and why."""


@dataclass(frozen=True)
class CodeGradients:
    """The gradients that a module's code computes from the incoming ones."""

    expected: dict[Leaf, Expected]
    reached: dict[Leaf, frozenset[int]]  # calls whose gradients have a part in it; -1: the module's own output's
    replaced: str = ""  # an operator that the code calls and the device did not, at least not with a gradient


class GradientTwin(HostTwin):
    """The modules of a model, copied without weights, differentiated around a recorded call tree."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__(model, autocast)
        for module in self._modules.values():
            vars(module)["_parameters"].source = self._parameter
        self._leaves: dict[int, Tensor] = {}  # parameters that the running code has read
        self._dtypes: dict[int, torch.dtype] = {}
        self._wide = True

    def gradients(self, node: Node, calls: GradientCalls) -> CodeGradients:
        """Gradients of a call's inputs, of the results of its inner calls, and of the parameters its code read."""
        exact = self._run_wide(node, calls)
        dtypes = {leaf: self._dtype(node, calls, leaf) for leaf in exact.gradients}

        def rounded(generator: torch.Generator) -> Mapping[Leaf, Tensor | None]:
            return self._run_back(node, calls, wide=False, mode=RoundingMode(generator)).gradients

        expected = expected_gradients(exact.gradients, dtypes, rounded)
        coarse = [leaf for leaf, each in expected.items() if rms(each.limit) > _COARSE * rms(each.values) > 0]
        if coarse:
            plain = self._run_back(node, calls, wide=False).gradients
            for leaf in coarse:
                own, value = plain[leaf], expected[leaf].values
                if own is not None and rms(own.double() - value) < _NEAR * rms(value):
                    raise NotDifferentiated("a branch in its code depends on rounding")
        return CodeGradients(expected, exact.reached, exact.replaced)

    def _run_wide(self, node: Node, calls: GradientCalls) -> _Back:
        """In float64 throughout; where the code insists on its dtypes, as far as it goes."""
        try:
            return self._run_back(node, calls, wide=True, mode=KeepFloat64())  # type: ignore[no-untyped-call]
        except NotDifferentiated:
            try:
                return self._run_back(node, calls, wide=True)
            except NotDifferentiated:
                return self._run_back(node, calls, wide=False)

    def _dtype(self, node: Node, calls: GradientCalls, leaf: Leaf) -> torch.dtype:
        side, at, path = leaf
        if side == WEIGHT:
            return self._dtypes[at]
        return calls.tapped(node if at < 0 else node.children[at], side)[path].dtype

    def _parameter(self, value: Tensor) -> Tensor:
        """A leaf that stands for a parameter of the model, in the precision of this run."""
        if id(value) not in self._leaves:
            if value.numel() > _MOST_PARAMETERS or type(value) not in (Tensor, nn.Parameter) or value.is_meta:
                raise NotDifferentiated(f"its code reads a packed or oversized parameter {list(value.shape)}")
            self._dtypes[id(value)] = value.dtype
            self._leaves[id(value)] = _leaf(value.detach().to("cpu"), wide=self._wide)
        return self._leaves[id(value)]

    def _run_back(
        self, node: Node, calls: GradientCalls, *, wide: bool, mode: TorchDispatchMode | None = None
    ) -> _Back:
        if node.changed:
            raise NotDifferentiated("it writes to its arguments")
        run = _GradientRun(node, calls, wide=wide)
        twin = self._modules.get(node.module)
        outer, self._running, self._leaves, self._wide = self._running, run, {}, wide
        state = own_state(twin) if twin is not None else None
        try:
            with torch.enable_grad(), without_checkpointing(), mode or nullcontext():
                args, kwargs = run.leaves_of(-1, INPUT, (node.args, node.kwargs))
                cast = self._cast_of(node)
                with torch._C._EnableTorchFunction(), run, torch.autocast("cpu", cast, enabled=cast is not None):
                    output = self._code(node, twin)(*args, **kwargs)
                    run.see(-1, output)
                return run.back(self._leaves)
        except NotDifferentiated:
            raise
        except Exception as error:  # third-party code may raise anything
            raise NotDifferentiated(
                f"its code can't be differentiated on the host ({type(error).__name__}: {str(error)[:80]})"
            ) from None
        finally:
            self._running = outer
            if twin is not None and state is not None:
                set_state(twin, state)

    def _code(self, node: Node, twin: nn.Module | None) -> Callable[..., Any]:
        if node.is_module and twin is not None:
            return functools.partial(_code_of(twin), twin)
        return node.callee  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Back:
    """The gradients of one run, in float64."""

    gradients: dict[Leaf, Tensor | None]
    reached: dict[Leaf, frozenset[int]]
    replaced: str


class _GradientRun(_Run):
    """One run of a module's code with a graph: calls are answered with leaves."""

    def __init__(self, node: Node, calls: GradientCalls, *, wide: bool) -> None:
        super().__init__(node, None, None)
        self.first = False
        self._calls, self._wide = calls, wide
        self._leaves: dict[Leaf, Tensor] = {}
        self._sent: dict[tuple[int, str], Tensor] = {}  # what a call was given (-1: what the module returned)
        self._operators = {F.scaled_dot_product_attention: FUSED, **operators_within(node.unit.kind)}
        self._replaced = ""

    def leaves_of(self, at: int, side: str, value: Any) -> Any:
        """A recorded tree with its own tensors, which are leaves where the device had gradients."""
        node = self.node if at < 0 else self.node.children[at]
        paths = iter([path for path, _ in tensors_in(value)])

        def leaf(x: Tensor) -> Tensor:
            path = next(paths)
            first = self._calls.first_path(node, side, path)
            if first is None:
                return x.double() if self._wide and x.is_floating_point() else x.clone()
            key = (side, at, first)
            if key not in self._leaves:
                self._leaves[key] = _leaf(x, wide=self._wide)
            return self._leaves[key].clone()  # code may write to it, which a leaf does not allow

        return mapped(value, leaf)

    def see(self, at: int, value: Any, changed: Any = ()) -> None:
        with torch._C.DisableTorchFunction():
            self._sent |= {(at, path): x for path, x in tensors_in(value) if x.requires_grad}

    def answer(self, at: int, given: Any) -> Any:
        child = self.node.children[at]
        if child.changed:
            raise NotDifferentiated("a call inside writes to its arguments")
        return self.leaves_of(at, OUTPUT, child.output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            at = self.next_call(lambda child: child.by_formula and child.callee is func and _alike_call(child, args))
            if at is None:
                if not any(child.callee is func and self._calls.tapped(child, OUTPUT) for child in self.node.children):
                    self._replaced = self._replaced or self._operators.get(func, "")
                return func(*args, **kwargs)
            self.see(at, (args, kwargs))
            return self.answer(at, (args, kwargs))

    def back(self, parameters: Mapping[int, Tensor]) -> _Back:
        """The gradients at the leaves, from those that the device recorded at the roots."""
        leaves = dict(self._leaves) | {(WEIGHT, key, ""): x for key, x in parameters.items()}
        total: dict[Leaf, Tensor | None] = dict.fromkeys(leaves)
        reached: dict[Leaf, set[int]] = {leaf: set() for leaf in leaves}
        ends: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for (at, path), x in self._sent.items():
            gradient = self._gradient(at, path)
            if gradient is None:
                continue
            if gradient.shape != x.shape:
                raise NotDifferentiated("its code returns different shapes on the host and on the device")
            ends.setdefault(at, []).append((x, gradient.to(x.dtype)))
        names = list(leaves)
        last = len(ends) - 1
        for number, (at, pairs) in enumerate(ends.items()):
            found = torch.autograd.grad(
                [x for x, _ in pairs],
                [leaves[name] for name in names],
                [gradient for _, gradient in pairs],
                allow_unused=True,
                retain_graph=number < last,
            )
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    before = total[name]
                    total[name] = gradient if before is None else before + gradient
                    reached[name].add(at)
        exact = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in total.items()}
        return _Back(dict(exact), {name: frozenset(calls) for name, calls in reached.items()}, self._replaced)

    def _gradient(self, at: int, path: str) -> Tensor | None:
        node, side = (self.node, OUTPUT) if at < 0 else (self.node.children[at], INPUT)
        return self._calls.gradient(node, side, path)


def _leaf(x: Tensor, *, wide: bool) -> Tensor:
    made = x.detach().double() if wide and x.is_floating_point() else x.detach()
    return made.clone().requires_grad_(made.is_floating_point() or made.is_complex())
