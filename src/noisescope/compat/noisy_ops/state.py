"""All global state of noisescope: `state`, guarded by its lock.

While enabled it also replaces `torch.nn.Module.__call__`: torch binds `forward` before it runs forward pre-hooks, so a
scope opened from a pre-hook would miss the very call it was opened for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from noisescope.compat.noisy_ops.settings import Settings
from noisescope.errors import InvalidInput, ModelHeld, NoiseRoundsAway, NothingInjected
from noisescope.injection import Injection
from noisescope.model.anatomy import CALLS, Anatomy, Unit, dissect
from noisescope.probe.draws import Rows
from noisescope.probe.forward_patching import unwrap
from noisescope.probe.forward_wrapper import ForwardWrapper, in_backward
from noisescope.probe.function_mode import perform
from noisescope.probe.functions import Function
from noisescope.probe.inject import Probe
from noisescope.probe.operator_target import Context, OperatorTarget
from noisescope.probe.tally import SiteCount
from noisescope.sites import GROUPS, PHASES, Place, matches_operator

_OUTSIDE = ""  # the place of a call that is made in no block


class _OpenModel(Probe):
    """The probe of one outermost module. It is nobody's `with`: any thread may call the module, and scopes opened on it
    in between (a capture) may be left before or after it."""

    any_order = True
    any_thread = True


class State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings = Settings()
        self.registered: tuple[weakref.ref[nn.Module], Anatomy] | None = None
        self.register_first = False  # layers named by the environment: of the first model with blocks that is called
        self.call: Callable[..., Any] | None = None  # replaces nn.Module.__call__ while enabled
        self.probes: list[_OpenModel] = []
        self.direct = DirectCalls()
        self.forwards = 0
        self.known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # inside an open root, or nothing there to hit
        self.closed: Counter[tuple[str, Place, str]] = Counter()  # counts of roots closed by now, less what was reset

    def change(self, **changes: Any) -> None:
        settings = dataclasses.replace(self.settings, **changes)
        settings.injection()  # refuses bad values before anything changes
        if self.call is not None:
            self.check_layers(settings)
        self.settings = settings
        self.direct.forget()
        self.known.clear()
        for probe in list(self.probes):
            injection = settings.injection(probe.anatomy, numbered=self.numbered(probe.model, probe.anatomy))
            if injection is None or not self.moved(probe, injection):
                self.close(probe)
            else:
                self.known |= set(probe.model.modules())

    def moved(self, probe: _OpenModel, injection: Injection) -> bool:
        """Whether a probe accepts another injection; if not (a capture is above it), the next call opens the model."""
        probe.gradients_only = self.settings.training_only
        try:
            probe.update(injection)
        except ModelHeld:
            return False
        return True

    def check_layers(self, settings: Settings) -> None:
        """Layer numbers have no meaning without a model."""
        named = settings.layers or ()
        if not named or self.register_first:
            return
        if self.registered is None:
            raise InvalidInput(
                "layers are selected, but no model is registered, so layer numbers can't be resolved: call "
                "register_layer_hooks(model) first, or set_selective_layers(None)"
            )
        depth = len(self.registered[1].blocks)
        for layer in named:
            if layer >= depth:
                raise InvalidInput(f"layer {layer} is out of range: the registered model has {depth} blocks")

    def numbered(self, root: nn.Module, anatomy: Anatomy) -> bool:
        """Whether a root's blocks are those of the registered model, or just any blocks where none is registered."""
        model = self.registered[0]() if self.registered else None
        if model is None or self.registered is None:
            return anatomy.blocks != ("",)
        theirs = [model.get_submodule(name) for name in self.registered[1].blocks]
        return [root.get_submodule(name) for name in anatomy.blocks] == theirs

    def watch(self) -> None:
        original = nn.Module.__call__
        uncompiled = torch.compiler.disable(self.meet)  # type: ignore[no-untyped-call]

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.call is call and module not in self.known:
                (uncompiled if torch.compiler.is_compiling() else self.meet)(module)
            return original(module, *args, **kwargs)

        self.original = original
        nn.Module.__call__ = self.call = call  # type: ignore[method-assign]

    def meet(self, module: nn.Module) -> None:
        """A module is about to be called: open it if it is the outermost one and contains a target."""
        with self.lock:
            root = unwrap(module)
            busy = any(probe.context is not None for probe in self.probes)
            if self.call is None or root in self.known or busy or in_backward():
                return  # a module made inside a forward, or a recomputation, is part of what was opened
            members = set(root.modules())
            anatomy = dissect(root, require_blocks=False)
            if self.register_first and self.registered is None and anatomy.blocks != ("",):
                self.registered, self.register_first = (weakref.ref(root), anatomy), False
                self.check_layers(self.settings)
            injection = self.settings.injection(anatomy, numbered=self.numbered(root, anatomy))
            if injection is None:
                self.known |= members
                return
            for probe in [p for p in self.probes if not members.isdisjoint(p.model.modules())]:
                if probe.held_elsewhere:
                    raise ModelHeld(
                        f"{type(root).__name__} shares modules with a {type(probe.model).__name__} that another "
                        f"thread is running: give each thread its own copy of the model, or let one wait for the other"
                    )
                self.close(probe)  # a part called before the whole: its noise would fall twice
            if any(_left_in_reverse(m.__dict__.get("forward")) for m in members):
                raise ModelHeld(
                    f"{type(root).__name__} was first called after enable_noisy_ops() inside another noisescope "
                    f"scope, but scopes must close in reverse order: call the model once before opening that scope"
                )
            gradients_only = self.settings.training_only
            probe = _OpenModel(root, injection, anatomy=anatomy, check=False, gradients_only=gradients_only)
            probe.forwards = self.forwards  # a module closed and opened again must not repeat its noise
            probe.__enter__()
            self.probes.append(probe)
            self.known |= members  # not before it is open: a call after a refusal must be refused, too

    def running(self) -> tuple[_OpenModel | None, Context | None]:
        """The open model that this thread is running, and which of its forwards and blocks."""
        for probe in self.probes:
            context = probe.context
            if context is not None:
                return probe, context
        return None, None

    def layer(self) -> int | None:
        """The block that this thread is inside, by the number that selections mean."""
        with self.lock:
            probe, context = self.running()
            place = None if context is None else context.place
            known = probe is not None and isinstance(place, int) and self.numbered(probe.model, probe.anatomy)
            return place if known else None

    def operator_call(self, name: str, operator: str, function: Function, args: list[Any], kwargs: Any) -> Any:
        """An operator called by name (NoisyMatMul): perturbed as one of a model would be, or passed through."""
        with self.lock:
            probe, context = self.running()
            watched = probe is not None and probe.owner is not None and probe.owner.targets_operator(operator)
            asleep = self.settings.training_only and context is None and not torch.is_grad_enabled()
            target = None
            if self.call is not None and not self.settings.off and not watched and not asleep:
                target = self.direct.target(self.settings, name, operator, self.layer())
            if target is not None and context is None:
                context = self.direct.context()
        if target is None or context is None:
            return function(*args, **kwargs)
        return perform(target, context, function, args, kwargs)

    def close(self, probe: _OpenModel) -> None:
        self.probes.remove(probe)
        self.forwards = max(self.forwards, probe.forwards)
        counts = _counts(probe.tally.sites, blocks=probe.anatomy.blocks != ("",))
        self.closed.update(counts)  # not +=, which drops what a reset made negative
        self.known -= set(probe.model.modules())
        probe.__exit__(None, None, None)

    def stop(self, *, check: bool) -> None:
        """Restore everything, then raise for targets that were never hit."""
        if self.call is None:
            return
        if nn.Module.__call__ is self.call:  # else it was wrapped since: ours only passes calls through from now on
            nn.Module.__call__ = self.original  # type: ignore[method-assign]
        self.call = None
        probes, settings = list(self.probes), self.settings
        with contextlib.ExitStack() as all_of_them:
            for probe in probes:
                all_of_them.callback(self.close, probe)
        self.known.clear()
        self.forwards = 0
        direct, self.direct = self.direct, DirectCalls()
        self.closed.update(_counts(direct.sites))
        if not check or settings.off:
            return
        fired = [site for probe in probes for site in probe.tally.sites if site.total] + direct.fired()
        if not fired and not any((self.closed + Counter()).values()):
            raise _nothing("no module with a targeted operator was called, or no backward pass ran")
        for probe in probes:
            probe.check_effects()
        direct.check_rounding()
        named = sorted(settings.operators or ())
        silent = [name for name in named if not direct.fired(name) and not any(one.fired(name) for one in probes)]
        silent += [f"layer {n}" for n in sorted(settings.layers or ()) if n not in {site.place for site in fired}]
        if silent and fired:
            raise _nothing(f"{', '.join(silent)} never fired in the modules that were called")

    def counts(self, view: str) -> dict[Any, dict[str, int]]:
        with self.lock:
            counts = self.closed + self._now()
        keys = sorted({key for kind, key, _ in counts if kind == view})
        return {key: {phase: counts[view, key, phase] for phase in PHASES} for key in keys}

    def reset(self, *views: str) -> None:
        with self.lock:
            now = self._now()
            keys = {*now, *self.closed}
            self.closed = Counter({key: (-now[key] if key[0] in views else self.closed[key]) for key in keys})

    def _now(self) -> Counter[tuple[str, Place, str]]:
        counts = _counts(self.direct.sites)
        for probe in self.probes:
            counts += _counts(probe.tally.sites, blocks=probe.anatomy.blocks != ("",))
        return counts


class DirectCalls:
    """Operators that a program calls by name (NoisyMatMul ...): a target and a count for each operator and block."""

    def __init__(self) -> None:
        self._targets: dict[tuple[str, Place], OperatorTarget | None] = {}
        self._counts: dict[tuple[str, Place], SiteCount] = {}
        self._looked: set[tuple[str, ...]] = set()
        self._calls = 0

    @property
    def sites(self) -> list[SiteCount]:
        return list(self._counts.values())

    def forget(self) -> None:
        """The settings changed: targets are rebuilt, counts continue."""
        self._targets.clear()

    def target(self, settings: Settings, name: str, operator: str, layer: int | None) -> OperatorTarget | None:
        """The target for a call; None if the settings leave it unchanged."""
        place: Place = _OUTSIDE if layer is None else layer
        key = (name, place)
        if key not in self._targets:
            injection = settings.anywhere(() if layer is None else (layer,), numbered=layer is not None)
            unit = Unit(name, CALLS, place, "", (operator,))
            self._targets[key] = None
            if settings.noisy_phases and injection.selects(unit.site(operator)):
                new = SiteCount(operator=operator, place=place, module=name, looked=self._looked)
                count = self._counts.setdefault(key, new)
                self._targets[key] = OperatorTarget(unit, operator, injection, count)
        return self._targets[key]

    def context(self) -> Context:
        """A call outside any model is a forward of its own."""
        self._calls += 1
        return Context(Rows(self._calls), grad=torch.is_grad_enabled())

    def fired(self, operator: str | None = None) -> list[SiteCount]:
        """Sites where noise fell, of one operator or group, or of all."""
        named = None if operator is None else {operator}
        return [site for site in self.sites if site.total and matches_operator(named, site.operator, "")]

    def check_rounding(self) -> None:
        """Noise that is lost to rounding everywhere counts as none."""
        for phase in PHASES:
            fired = [site for site in self.sites if (site.forward if phase == "forward" else site.backward)]
            if fired and all(phase in site.rounded_away for site in fired):
                scale, floor, dtype = fired[0].rounded_away[phase]
                raise NoiseRoundsAway(
                    f"{fired[0].module}, {phase}: noise of scale {scale:g} is lost to rounding in {dtype}. The "
                    f"smallest scale that has an effect is {floor:.4g}; raise the scale, or use a higher-precision "
                    f"dtype"
                )


def _counts(sites: list[SiteCount], *, blocks: bool = True) -> Counter[tuple[str, Place, str]]:
    """(view, layer or operator, phase) -> injections. "gemm" sums the products, whose parts are counted too.

    `blocks` says that numbered places are blocks of a model, not a module that has none.
    """
    counts: Counter[tuple[str, Place, str]] = Counter()
    for site in sites:
        views: list[tuple[str, Place]] = [("total", ""), ("operator", site.operator)]
        if site.operator in GROUPS["gemm"][0]:
            views.append(("operator", "gemm"))
        if isinstance(site.place, int) and blocks:
            views.append(("layer", site.place))
        for view, key in views:
            counts[view, key, "forward"] += site.forward
            counts[view, key, "backward"] += site.backward
    return counts


def _left_in_reverse(forward: object) -> bool:
    """Whether a scope on a module must be left after all that were opened on it later."""
    while isinstance(forward, ForwardWrapper):
        if not forward.retired and not forward.scope.any_order:
            return True
        forward = forward.replaced
    return False


def _nothing(why: str) -> NothingInjected:
    return NothingInjected(
        f"nothing was injected: {why}. Noise is injected only into torch.nn.Module calls between enable_noisy_ops() "
        f"and "
        "disable_noisy_ops(), not into raw tensor calls outside modules. To turn noise off on purpose, select []."
    )


state = State()
