"""Hessian traces in memory for one block: the products of `curvature.hessian_traces`, computed block by block.

For blocks x' = f(x, w) and a loss l of the last output, H v follows from three passes over the blocks, each of which
computes a block again from its kept input and lets its graph go:

    a  = J_x^T a'                                   backward: adjoints a of all block inputs, once
    t' = J_x t + J_w v                              forward: tangents t of all block inputs, t = 0 at the first
    (b, H v) = d/d(x, w) [b' . f + a' . (J_x t + J_w v)]     backward: the tangent b of each adjoint

Kept are x, a and t of every block. The graph of a double backward through all blocks holds all activations twice, and
a gradient, a probe and a product for every weight beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from noisescope import progress
from noisescope.measures.curvature import (
    Groups,
    Loss,
    TraceEstimate,
    estimate_trace,
    gradient_norms,
    members_of,
    only_these_learn,
    rademacher,
)
from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.probe.functions import with_tensor
from noisescope.probe.prefix import Prefix
from noisescope.probe.recomputation import Recomputing
from noisescope.probe.recorded_call import RecordedCall
from noisescope.probe.watch import watch


def block_hessian_traces(
    model: nn.Module, anatomy: Anatomy, loss_of: Loss, groups: Groups, *, probes: int, seed: int
) -> dict[str, TraceEstimate] | None:
    """Hutchinson's estimates for groups of which each is in one block; None where blocks are not a plain chain."""
    members = members_of(groups)
    samples: dict[nn.Parameter, list[Tensor]] = {p: [] for p in members}
    with only_these_learn(model, members), sdpa_kernel(SDPBackend.MATH):
        chain = _Chain(model, anatomy, loss_of, members)
        if not chain.holds:
            return None
        generator = torch.Generator(members[0].device).manual_seed(seed)
        for _ in progress.parts(range(probes)):
            for p, product in chain.products(generator):
                samples[p].append(product)
    values = {p: torch.stack(found).cpu().double() for p, found in samples.items()}
    estimates = {}
    for name, group in groups.items():
        whole = torch.stack([values[p] for p in dict.fromkeys(group)]).sum(0)
        estimates[name] = estimate_trace(whole, sum(p.numel() for p in set(group)), probes)
    return estimates


class _Chain:
    """The calls of a model's blocks, each of which can be made again."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, loss_of: Loss, members: Sequence[nn.Parameter]) -> None:
        self.model, self.anatomy, self.loss_of = model, anatomy, loss_of
        self.calls: list[RecordedCall] = []
        with torch.no_grad(), watch(model, self.calls.append, _is_block, anatomy=anatomy):
            loss_of(model)
        wanted = set(members)
        self.weights = [[p for p in call.callee.parameters() if p in wanted] for call in self.calls]
        self.adjoints: list[Tensor] = []
        self.holds = self._is_chain(members)
        if self.holds:
            self._find_adjoints()
            self.holds = self._explains_gradients()

    def _find_adjoints(self) -> None:
        adjoint = self._head(None)
        for at in reversed(range(len(self.calls))):
            self.adjoints.insert(0, adjoint)
            x = self._input(at)
            (adjoint,) = torch.autograd.grad(self._run(at, x), [x], adjoint)

    def _explains_gradients(self) -> bool:
        """The first block's gradient is that of the model: no block reads of another but by its input."""
        weights = self.weights[0]
        slopes = torch.autograd.grad(self._run(0, self._input(0)), weights, self.adjoints[0], **_USED)
        found = math.hypot(*(float(torch.linalg.vector_norm(g, dtype=torch.float32)) for g in slopes))
        with Recomputing(self.model, self.anatomy):
            whole = gradient_norms(self.model, self.loss_of, {"first": weights})["first"]
        return abs(found - whole) <= _SAME * whole

    def _is_chain(self, members: Sequence[nn.Parameter]) -> bool:
        """Each block ran once, in order, on what the one before it gave; weights are in one block each, in order."""
        places = [call.unit.place for call in self.calls]
        inputs, outputs = [call.first_input for call in self.calls], [call.output_tensor for call in self.calls]
        linked = all(
            x is not None and y is not None and x.data_ptr() == y.data_ptr() and x.shape == y.shape
            for x, y in zip(inputs[1:], outputs, strict=False)
        )
        in_order = [id(p) for weights in self.weights for p in weights] == [id(p) for p in members]
        one_device = len({p.device for p in members}) == 1
        return places == list(range(len(self.anatomy.blocks))) and bool(places) and linked and in_order and one_device

    def products(self, generator: torch.Generator) -> list[tuple[nn.Parameter, Tensor]]:
        """v . H v of every weight for one v; drawn again where it is used again."""
        states, tangents = [], [torch.zeros_like(self._input(0))]
        for at, weights in enumerate(self.weights):
            states.append(generator.get_state())
            probe = [rademacher(p.shape, generator, p.dtype) for p in weights]
            tangents.append(self._tangent(at, tangents[at], probe))
        after = generator.get_state()
        found, moved = [], self._head(tangents.pop())
        for at in reversed(range(len(self.calls))):
            generator.set_state(states[at])
            probe = [rademacher(p.shape, generator, p.dtype) for p in self.weights[at]]
            x, weights = self._input(at), self.weights[at]
            y = self._run(at, x)
            slopes = torch.autograd.grad(y, [x, *weights], self.adjoints[at], **_OPEN)
            pairs = [(y, moved), *zip(slopes, [tangents.pop(), *probe], strict=True)]
            outputs, along = zip(*((one, other) for one, other in pairs if one.requires_grad), strict=True)
            moved, *curved = torch.autograd.grad(outputs, [x, *weights], along, **_USED)
            triples = zip(weights, probe, curved, strict=True)
            found += [(p, (v.float() * hv.float()).sum()) for p, v, hv in triples]
        generator.set_state(after)
        return found

    def _tangent(self, at: int, tangent: Tensor, probe: list[Tensor]) -> Tensor:
        """J_x t + J_w v: what J^T u is differentiated by u, along (t, v)."""
        x, weights = self._input(at), self.weights[at]
        y = self._run(at, x)
        u = torch.zeros_like(y, requires_grad=True)
        slopes = torch.autograd.grad(y, [x, *weights], u, **_OPEN)
        live = [(g, v) for g, v in zip(slopes, [tangent, *probe], strict=True) if g.requires_grad]
        outputs, along = zip(*live, strict=True)
        return torch.autograd.grad(outputs, [u], along, **_USED)[0]

    def _head(self, tangent: Tensor | None) -> Tensor:
        """The loss after the blocks: its gradient in their output, or that gradient's change along a tangent."""
        last = len(self.calls) - 1
        output = self.calls[last].output_tensor
        assert output is not None
        leaf = output.detach().requires_grad_(True)
        given: dict[int, Any] = {at: call.output for at, call in enumerate(self.calls)}
        whole = given[last]
        given[last] = leaf if isinstance(whole, Tensor) else (leaf, *whole[1:])
        with Prefix(self.model, self.anatomy) as prefix, prefix.replacing(given):
            loss = self.loss_of(self.model)
        (slope,) = torch.autograd.grad(loss, [leaf], create_graph=tangent is not None)
        return slope if tangent is None else torch.autograd.grad(slope, [leaf], tangent, **_USED)[0]

    def _input(self, at: int) -> Tensor:
        x = self.calls[at].first_input
        assert x is not None
        return x.detach().requires_grad_(True)

    def _run(self, at: int, x: Tensor) -> Tensor:
        call = self.calls[at]
        args, kwargs = with_tensor(call.args, call.kwargs, call.first_input, x)
        y = call.callee(*args, **kwargs)
        return y if isinstance(y, Tensor) else y[0]


_SAME = 0.02  # gradient norms of 16 bits, computed twice in the same way
_USED: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
_OPEN: dict[str, Any] = {"create_graph": True, **_USED}


def _is_block(unit: Unit, operator: str) -> bool:
    return operator == "residual" and unit.kind == MODULE
