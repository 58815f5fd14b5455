"""What happens at one operator of one unit: a perturbation is applied, or its calls are reported.

Gradients pass a forward perturbation unchanged: a rounding error has no derivative (straight-through). A backward
perturbation is applied to the gradient of each input and of the weight as this use of it produced it, so tied weights
and accumulated gradients get their noise once per use.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.injection import Injection, Perturbation
from noisescope.model.anatomy import Unit
from noisescope.probe.draws import Draw, Rows
from noisescope.probe.formats import Format
from noisescope.probe.functions import first_tensor, inside_vmap, with_tensor
from noisescope.probe.recorded_call import RecordedCall, by_head
from noisescope.probe.tally import SiteCount
from noisescope.sites import Site

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[RecordedCall], Tensor | Arguments | None]

_SAMPLED_ROWS = 16  # rows sampled to measure the share of changed elements
_WEIGHT_ROWS = Rows(number=-1)  # a weight has no sample and no position: its perturbation is the same in every forward


class Context:
    """One call of the model, or of one block within it: which rows run, and how often each target has fired in it."""

    __slots__ = ("fired", "grad", "place", "recomputing", "rows", "scratch")

    def __init__(self, rows: Rows, place: Any = None, *, recomputing: bool = False, grad: bool = False) -> None:
        self.scratch: dict[Any, Tensor] = {}  # buffers that the draws of one forward share
        self.rows = rows
        self.place = place
        self.fired: dict[int, int] = {}
        self.recomputing = recomputing  # gradient checkpointing runs this forward again: same noise, no tally
        self.grad = grad

    def occurrence(self, target: Target) -> int:
        count = self.fired.get(id(target), 0)
        self.fired[id(target)] = count + 1
        return count


class OperatorTarget:
    """Applies an injection to one operator of one unit."""

    def __init__(self, unit: Unit, operator: str, injection: Injection, count: SiteCount) -> None:
        self.unit = unit
        self.operator = operator
        self.count = count
        self.tensor = injection.tensor
        self.wants_input = injection.tensor == "input"
        self.wants_weight = injection.tensor == "weight"
        self.seed = injection.seed
        self.channels = injection.channels
        self.renormalise = injection.renormalise and operator == "softmax"
        site = unit.site(operator)
        self.forward: Perturbation | None = None
        self.backward: Perturbation | None = None
        if "forward" in injection.phases:
            self.forward = injection.perturbation_at(site)
        if "backward" in injection.phases:
            self.backward = injection.perturbation_at(unit.site(operator, phase="backward"))
        if self.channels is not None:  # channels are the forward tensor's: a gradient has others
            self.backward = None
        self.layout = "heads" if by_head(unit, operator) else "tokens"
        if operator == "embedding" and re.search(r"pos|wpe|relative", unit.module):
            self.layout = "positions"
        self._keys: dict[tuple[str, str, int], int] = {}
        self._mask: Tensor | None = None
        self._new = {"forward", "backward"}  # phases in which this target has not fired yet

    def reseed(self, seed: int) -> None:
        """Draw with another seed; keys hashed with the previous one are discarded."""
        self.seed = seed
        self._keys.clear()

    def key(self, tensor: str, phase: str, occurrence: int) -> int:
        """The site's multiplier for the row hash, memoised: hashing once per site, not per call."""
        known = (tensor, phase, occurrence)
        if known not in self._keys:
            unit = self.unit
            site = Site(self.operator, unit.place, unit.module, unit.component, tensor, phase, occurrence)
            self._keys[known] = site.key(self.seed)
        return self._keys[known]

    # -- forward

    def on_output(
        self, y: Any, context: Context, occurrence: int, *, fresh: bool, storage: torch.dtype | None = None
    ) -> Any:
        """The perturbed output; `fresh` says that nobody else holds it, so it may be changed in place.

        `storage` is the dtype in which the result will be kept, where that is not y's own.
        """
        if self.forward is None or self.tensor != "output":
            return y
        if not isinstance(y, Tensor):  # a block that returns a tuple: its hidden states come first
            if isinstance(y, tuple) and y and isinstance(y[0], Tensor):
                return (self.on_output(y[0], context, occurrence, fresh=False), *y[1:])
            raise InvalidInput(f"{self.unit.site(self.operator)} returned {type(y).__name__}, not a tensor")
        self._note_rounding(self.forward, storage or y.dtype)
        return self._forward(y, context, context.rows, occurrence, self.layout, "output", fresh=fresh)

    def on_input(self, x: Tensor, context: Context, occurrence: int) -> Tensor:
        if self.forward is None or self.tensor != "input":
            return x
        self._note_rounding(self.forward, x.dtype)
        return self._forward(x, context, context.rows, occurrence, self.layout, "input", fresh=False)

    def on_weight(self, weight: Tensor, context: Context, occurrence: int) -> Tensor:
        if self.forward is None or self.tensor != "weight":
            return weight
        self._note_rounding(self.forward, weight.dtype)
        return self._forward(weight, context, _WEIGHT_ROWS, occurrence, "plain", "weight", fresh=False)

    def _forward(
        self, y: Tensor, context: Context, rows: Rows, occurrence: int, layout: str, tensor: str, *, fresh: bool
    ) -> Tensor:
        if not y.is_floating_point():
            raise InvalidInput(
                f"the {tensor} of {self.unit.site(self.operator)} is {y.dtype}; noise applies only to "
                f"floating-point tensors"
            )
        draw = Draw(rows, self.key(tensor, "forward", occurrence), layout=layout, tensor=tensor)
        draw.scratch = context.scratch
        perturbation = self.forward
        assert perturbation is not None
        every = isinstance(perturbation, Format)
        first = "forward" in self._new and not context.recomputing and self.count.look("forward", every=every)
        before = _sample(y) if first else None
        if y.requires_grad and torch.is_grad_enabled():
            noisy: Tensor = StraightThrough.apply(  # type: ignore[no-untyped-call]
                y, functools.partial(self._apply, perturbation, draw)
            )
        else:
            draw.overwrite = fresh and self.channels is None and not y.requires_grad
            noisy = self._apply(perturbation, draw, y)
        if not context.recomputing:
            self.count.forward += 1
            self._new.discard("forward")
            if before is not None:
                self._note_change(before, _sample(noisy))
        return noisy

    def _apply(self, perturbation: Perturbation, draw: Draw, y: Tensor) -> Tensor:
        shut = None
        if self.operator == "softmax" and getattr(perturbation, "relative_to", "element") != "element":
            shut = y == 0  # what the mask shut out stays out
        noisy: Tensor = perturbation(y, draw)
        if self.channels is not None:
            noisy = torch.where(self._channel_mask(y), noisy, y)
        if shut is not None:
            noisy = noisy.masked_fill(shut, 0)
        if self.renormalise and draw.tensor == "output":
            noisy = noisy / noisy.sum(-1, keepdim=True)
        return noisy

    def _channel_mask(self, y: Tensor) -> Tensor:
        width = y.shape[-1]
        if self._mask is None or self._mask.shape[0] != width or self._mask.device != y.device:
            assert self.channels is not None
            if self.channels[-1] >= width:
                raise InvalidInput(
                    f"channel {self.channels[-1]} is out of range: {self.unit.site(self.operator)} has {width} channels"
                )
            mask = torch.zeros(width, dtype=torch.bool)
            mask[list(self.channels)] = True
            self._mask = mask.to(y.device)
        return self._mask

    def _note_change(self, before: Tensor, after: Tensor) -> None:
        """Count changed elements on the device; they are read on demand, so nothing synchronises here.

        Exact zeros are left out: relative noise can't change them (masked attention, padding).
        """
        alive = before != 0
        if self.channels is not None:
            alive = alive & self._channel_mask(before)
        self.count.samples.append((((before != after) & alive).sum(), alive.sum()))

    def _note_rounding(self, perturbation: Perturbation, dtype: torch.dtype, phase: str = "forward") -> None:
        """Whether noise of this size can survive in this dtype; checked once per site."""
        if phase not in self._new or not dtype.is_floating_point:
            return
        scale = getattr(perturbation, "scale", None)
        self.count.control = self.count.control or scale == 0
        floor = getattr(perturbation, "smallest_surviving", lambda eps: None)(torch.finfo(dtype).eps)
        if floor is not None and scale is not None and 0 < scale < floor:
            self.count.rounded_away[phase] = (scale, floor, str(dtype).removeprefix("torch."))

    # -- backward

    def tap(self, x: Tensor, context: Context, occurrence: int, which: str, once: Once) -> Tensor:
        """The same tensor, whose gradient from this use will be perturbed; `once` is shared by the taps of one call."""
        if self.backward is None or not x.requires_grad:
            return x
        layout = self.layout if which == "input" else "plain"
        on_gradient = functools.partial(self._on_gradient, context.rows, occurrence, which, layout, once)
        tapped: Tensor = _Tap.apply(x, on_gradient)  # type: ignore[no-untyped-call]
        return tapped

    def _on_gradient(self, rows: Rows, occurrence: int, which: str, layout: str, once: Once, g: Tensor) -> Tensor:
        perturbation = self.backward
        assert perturbation is not None
        draw = Draw(rows, self.key(which, "backward", occurrence), layout=layout, tensor=which)
        noisy: Tensor = perturbation(g, draw)
        if once.is_first():
            self._note_rounding(perturbation, g.dtype, "backward")
            if "backward" in self._new and self.count.look("backward"):
                self._note_change(_sample(g), _sample(noisy))
            self.count.backward += 1
            self._new.discard("backward")
        return noisy


class CallListener:
    """Takes the place of a target, and reports whole calls of one operator of one unit.

    `before` gets a call that is about to be made, and may give another first tensor, or all arguments as a new pair
    (args, kwargs); `on_call` one that was made, and may give another output. None leaves things as they are.
    `rerun(callee, *args, **kwargs)` makes a call again. `recomputed` says whether calls that gradient checkpointing
    repeats are reported as well. A call that `before` or `on_call` itself makes of the same operator is reported only
    if `repeated` says so.
    """

    def __init__(
        self,
        unit: Unit,
        operator: str,
        on_call: Callable[[RecordedCall], Any],
        *,
        rerun: Callable[..., Any],
        before: Before | None = None,
        recomputed: bool = False,
        repeated: bool = False,
    ) -> None:
        self.unit = unit
        self.operator = operator
        self._on_call = on_call
        self._rerun = rerun
        self._before = before
        self._recomputed = recomputed
        self._repeated = repeated
        self._reporting = False

    def run(
        self,
        callee: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        context: Context,
        occurrence: int,
    ) -> Any:
        """Make one call of the operator; `call` is how `callee` is reached past its wrapper."""
        if (self._reporting and not self._repeated) or (context.recomputing and not self._recomputed):
            return call(*args, **kwargs)
        if inside_vmap():  # its tensors have no numbers of their own: the code around it is what can be seen
            return call(*args, **kwargs)
        known = (self.unit, self.operator, callee)
        if self._before is not None:
            new = self._report(self._before, RecordedCall(*known, args, kwargs, None, occurrence, context, self._rerun))
            if isinstance(new, tuple):
                args, kwargs = new
            elif new is not None:
                args, kwargs = with_tensor(args, kwargs, first_tensor(args, kwargs), new)
        y = call(*args, **kwargs)
        other = self._report(self._on_call, RecordedCall(*known, args, kwargs, y, occurrence, context, self._rerun))
        return y if other is None else other

    def _report(self, listener: Callable[[RecordedCall], Any], call: RecordedCall) -> Any:
        self._reporting = True
        try:
            return listener(call)
        finally:
            self._reporting = False


Target = OperatorTarget | CallListener


class Once:
    """A call of an operator has several gradients and is counted once in each backward pass."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: int | None = None

    def is_first(self) -> bool:
        task = torch._C._current_graph_task_id()
        first, self._task = task != self._task, task
        return first


def _sample(y: Tensor) -> Tensor:
    """A copy of some rows, spread over the tensor."""
    rows = y.detach()
    if rows.dim() > 1:
        rows = rows.reshape(-1, rows.shape[-1])
        rows = rows[:: max(1, rows.shape[0] // _SAMPLED_ROWS)][:_SAMPLED_ROWS]
    return rows.clone()


class StraightThrough(torch.autograd.Function):
    """f(y) forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Tap(torch.autograd.Function):
    """Identity forward, f(gradient) backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.f = f
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.f(gradient), None
