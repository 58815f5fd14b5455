"""`watch`: reports the calls of chosen operators while the model runs. Everything that observes a model uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.model.anatomy import Anatomy, Unit
from noisescope.probe.forward_patching import ModelScope
from noisescope.probe.operator_target import Before, CallListener
from noisescope.probe.recorded_call import RecordedCall as RecordedCall
from noisescope.sites import Place

OnCall = Callable[[RecordedCall], Any]
Selection = Callable[[Unit, str], bool]


def watch(
    model: nn.Module,
    on_call: OnCall,
    where: Selection | None = None,
    *,
    operators: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    places: Iterable[Place] | None = None,
    modules: Iterable[str] | None = None,
    before: Before | None = None,
    recomputed: bool = False,
    repeated: bool = False,
    anatomy: Anatomy | None = None,
) -> WatchScope:
    """A scope in which every call of the chosen operators is reported right after it happens.

    >>> import torch, noisescope as ns
    >>> model, sizes = ns.load("tiny:llama").model, {}
    >>> def on_call(call):
    ...     sizes[call.site.module] = call.output_tensor.detach().abs().max().item()
    >>> with ns.watch(model, on_call, operators={"linear"}, layers={1}):
    ...     output = model(torch.arange(8)[None])
    >>> len(sizes), "model.layers.1.self_attn.q_proj" in sizes
    (7, True)

    `on_call` gets a `RecordedCall` in the thread and at the point of the forward where the call was made. It returns
    None, or a replacement for the output that the model continues with. Copy the tensors that you keep: the model, or
    noise
    from another scope, may change them in place later. `before` gets the same call before it is made (its
    `output` is None) and may return another first tensor, or all arguments as a pair (args, kwargs).

    `operators`, `layers`, `places` and `modules` select as in an `Injection`; `where(unit, operator)` selects by itself
    where no set is given, and narrows the sets otherwise. A fused attention call is an operator "attention" of its
    unit, reported as a whole where it is selected: by default, or by `where`. Where it is not, and `softmax` or
    `matmul` are, attention is opened and these are reported.

    What gradient checkpointing computes again is not reported again. Say `recomputed=True` where `on_call` changes
    outputs that gradients pass through: then it is called in both, and `call.context.recomputing` distinguishes them.
    Calls of the same operator that `on_call` makes itself (`call.again(x)`) are reported only with `repeated=True`.
    """
    if not callable(on_call) or (where is not None and not callable(where)):
        raise InvalidInput("on_call and where must be functions: on_call(call), where(unit, operator)")
    chosen = sites_of(operators, layers, places, modules)
    selected = selected_by(chosen)
    if where is None:
        where = selected
    elif any(given is not None for given in (operators, layers, places, modules)):
        narrowing = where

        def where(unit: Unit, operator: str) -> bool:
            return selected(unit, operator) and narrowing(unit, operator)

    scope = WatchScope(model, on_call, where, before=before, recomputed=recomputed, repeated=repeated, anatomy=anatomy)
    scope.anatomy.check_layers(chosen.named_places)
    return scope


def sites_of(
    operators: Iterable[str] | None,
    layers: Iterable[int] | None,
    places: Iterable[Place] | None,
    modules: Iterable[str] | None,
) -> Injection:
    """An injection that selects the same sites, and rejects what it would reject; it changes nothing."""
    sets: dict[str, Any] = {"operators": operators, "layers": layers, "places": places, "modules": modules}
    return Injection(lambda y, draw: y, **sets)


def selected_by(injection: Injection) -> Selection:
    """Which operators of which units an injection selects."""
    return lambda unit, operator: injection.selects(unit.site(operator))


class WatchScope(ModelScope):
    """A scope that reports calls."""

    def __init__(
        self,
        model: nn.Module,
        on_call: OnCall,
        where: Selection,
        *,
        before: Before | None = None,
        recomputed: bool = False,
        repeated: bool = False,
        anatomy: Anatomy | None = None,
    ) -> None:
        super().__init__(model, anatomy)
        self._on_call = on_call
        self._where = where
        self._before = before
        self._recomputed = recomputed
        self._repeated = repeated

    def target_at(self, unit: Unit, operator: str) -> CallListener | None:
        if not self._where(unit, operator):
            return None
        return CallListener(
            unit,
            operator,
            self._on_call,
            rerun=self.rerun,
            before=self._before,
            recomputed=self._recomputed,
            repeated=self._repeated,
        )
