"""The global state of noisescope, all of it: `state`, guarded by its lock.

While enabled it also replaces `torch.nn.Module.__call__`: torch binds `forward` before it runs forward pre-hooks, so a
door opened from a pre-hook would miss the very call it was opened for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from noisescope.anatomy import Anatomy, dissect
from noisescope.errors import InvalidInput, ModelHeld, NothingInjected, unknown
from noisescope.injection import Injection, Perturbation
from noisescope.probe.door import unwrap
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Bias, Gaussian, Uniform
from noisescope.probe.stand_in import StandIn, in_backward
from noisescope.sites import GROUPS, PHASES, Place, matches_operator

ERROR_TYPES: dict[str, Callable[[float], Perturbation]] = {
    "relative_gaussian": Gaussian,
    "rms_gaussian": lambda scale: Gaussian(scale, "rms"),
    "absolute_gaussian": lambda scale: Gaussian(scale, "absolute"),
    "uniform": Uniform,
    "systematic_bias": Bias,
}
_PRODUCTS = frozenset({"gemm"})
_ALL_OPS = frozenset({"gemm", "softmax", "silu", "gelu", "norm"})


@dataclass(frozen=True)
class Settings:
    scale: float = 0.05
    kind: str = "relative_gaussian"
    all_ops: bool = False
    seed: int = 0
    phases: frozenset[str] = frozenset(PHASES)
    layers: frozenset[int] | None = None
    operators: frozenset[str] | None = None
    operator_scales: Mapping[str, float] = field(default_factory=dict)
    layer_scales: Mapping[Place, float] = field(default_factory=dict)
    training_only: bool = False  # no noise where no gradients are recorded

    @property
    def off(self) -> bool:
        """Switched off on purpose, by an empty selection."""
        return self.layers == frozenset() or self.operators == frozenset()

    def wanted(self) -> frozenset[str]:
        return self.operators if self.operators is not None else _ALL_OPS if self.all_ops else _PRODUCTS

    def injection(self, anatomy: Anatomy | None = None, *, numbered: bool = True) -> Injection | None:
        """What falls on a module of this anatomy; None where nothing in it is aimed at.

        `numbered`: the block numbers of this anatomy are the layer numbers meant.
        """
        if self.kind not in ERROR_TYPES:
            raise unknown("error type", self.kind, ERROR_TYPES)
        places: dict[Place, float] = dict.fromkeys(anatomy.places() if anatomy else (), self.scale)
        whole = Injection(
            ERROR_TYPES[self.kind](self.scale),
            operators=self.wanted(),
            layers=self.layers,
            phases=self.phases or frozenset(PHASES),
            phase_scales=dict.fromkeys(PHASES, 1.0),  # the multipliers below are absolute scales
            operator_multipliers=self.operator_scales,
            layer_multipliers=places | (dict(self.layer_scales) if numbered else {}),
            seed=self.seed,
        )
        if anatomy is None:
            return whole
        hits = [(op, u.component) for u in anatomy.units for op in u.operators if whole.selects(u.site(op))]
        present = frozenset(n for n in self.wanted() if any(matches_operator({n}, *hit) for hit in hits))
        aimed = present and self.phases and not self.off and (numbered or self.layers is None)
        return dataclasses.replace(whole, operators=present) if aimed else None


class State:
    """All that is global here."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings = Settings()
        self.registered: tuple[weakref.ref[nn.Module], Anatomy] | None = None
        self.register_first = False  # layers named by the environment: of the first model with blocks that is called
        self.call: Callable[..., Any] | None = None  # what stands in nn.Module.__call__ while enabled
        self.probes: list[Probe] = []
        self.forwards = 0
        self.known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # inside an open root, or nothing there to hit
        self.closed: Counter[tuple[str, Place, str]] = Counter()  # counts of roots closed by now, less what was reset

    def change(self, **changes: Any) -> None:
        settings = dataclasses.replace(self.settings, **changes)
        settings.injection()  # refuses bad values before anything changes
        if self.call is not None:
            self.check_layers(settings)
        self.settings = settings
        self.known.clear()
        for probe in list(self.probes):
            injection = settings.injection(probe.anatomy, numbered=self.numbered(probe.model, probe.anatomy))
            if injection is None:
                self.close(probe)
            else:
                probe.update(injection)
                self.known |= set(probe.model.modules())

    def check_layers(self, settings: Settings) -> None:
        """Layer numbers mean nothing without a model."""
        named = settings.layers or ()
        if not named or self.register_first:
            return
        if self.registered is None:
            raise InvalidInput(
                "layers are selected, but no model is registered, so their numbers mean nothing yet: call "
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
        """A module is about to be called: open it if it is the outermost one and something in it is aimed at."""
        with self.lock:
            root = unwrap(module)
            busy = any(p.context is not None and p.thread == threading.get_ident() for p in self.probes)
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
            for probe in [p for p in self.probes if p.thread == threading.get_ident()]:
                if not members.isdisjoint(probe.model.modules()):
                    self.close(probe)  # a part called before the whole: its noise would fall twice
            if any(isinstance(m.__dict__.get("forward"), StandIn) for m in members):
                raise ModelHeld(
                    f"{type(root).__name__} is called for the first time since enable_noisy_ops() inside a scope of "
                    "noisescope, and scopes are left in reverse order: call it once before that scope"
                )
            gradients_only = self.settings.training_only
            probe = Probe(root, injection, anatomy=anatomy, check=False, gradients_only=gradients_only)
            probe.forwards = self.forwards  # a module closed and opened again must not repeat its noise
            probe.__enter__()
            self.probes.append(probe)
            self.known |= members  # not before it is open: a call after a refusal must be refused, too

    def close(self, probe: Probe) -> None:
        self.probes.remove(probe)
        self.forwards = max(self.forwards, probe.forwards)
        self.closed.update(_counts([probe]))  # not +=, which drops what a reset made negative
        self.known -= set(probe.model.modules())
        probe.__exit__(None, None, None)

    def stop(self, *, check: bool) -> None:
        """Take everything back, then say what was aimed at and never hit."""
        if self.call is None:
            return
        if nn.Module.__call__ is self.call:  # else somebody wrapped it since: ours only passes on from now
            nn.Module.__call__ = self.original  # type: ignore[method-assign]
        self.call = None
        probes, settings = list(self.probes), self.settings
        with contextlib.ExitStack() as all_of_them:
            for probe in probes:
                all_of_them.callback(self.close, probe)
        self.known.clear()
        self.forwards = 0
        if not check or settings.off:
            return
        fired = [site for probe in probes for site in probe.tally.sites if site.total]
        if not fired and not any((self.closed + Counter()).values()):
            raise _nothing("no module with an operator aimed at was called, or no backward pass ran")
        for probe in probes:
            probe.check_effects()
        silent = [name for name in sorted(settings.operators or ()) if not any(p.fired(name) for p in probes)]
        silent += [f"layer {n}" for n in sorted(settings.layers or ()) if n not in {site.place for site in fired}]
        if silent and fired:
            raise _nothing(f"{', '.join(silent)} never fired in the modules called")

    def counts(self, view: str) -> dict[Any, dict[str, int]]:
        with self.lock:
            counts = self.closed + _counts(self.probes)
        keys = sorted({key for kind, key, _ in counts if kind == view})
        return {key: {phase: counts[view, key, phase] for phase in PHASES} for key in keys}

    def reset(self, *views: str) -> None:
        with self.lock:
            now = _counts(self.probes)
            self.closed = Counter(
                {key: (-now[key] if key[0] in views else self.closed[key]) for key in {*now, *self.closed}}
            )


def _counts(probes: list[Probe]) -> Counter[tuple[str, Place, str]]:
    """(view, layer or operator, phase) -> injections. "gemm" sums the products, whose parts are counted too."""
    counts: Counter[tuple[str, Place, str]] = Counter()
    for probe in probes:
        for site in probe.tally.sites:
            views: list[tuple[str, Place]] = [("total", ""), ("operator", site.operator)]
            if site.operator in GROUPS["gemm"][0]:
                views.append(("operator", "gemm"))
            if isinstance(site.place, int) and probe.anatomy.blocks != ("",):
                views.append(("layer", site.place))
            for view, key in views:
                counts[view, key, "forward"] += site.forward
                counts[view, key, "backward"] += site.backward
    return counts


def _nothing(why: str) -> NothingInjected:
    return NothingInjected(
        f"nothing was injected: {why}. Noise falls on calls of torch.nn.Module between enable_noisy_ops() and "
        "disable_noisy_ops(), not on raw tensor calls outside modules. To switch noise off on purpose, select []."
    )


state = State()
