"""Noise in whatever modules this process calls: the functional interface of the original method notes.

    from noisescope import noisy_ops

    noisy_ops.set_selective_operators(["softmax"])
    noisy_ops.enable_noisy_ops(error_scale=0.05)
    model(tokens)
    noisy_ops.disable_noisy_ops()  # the counts; NothingInjected where nothing was hit

`enable_noisy_ops` takes no model: the outermost module called is opened as `noisescope.inject` would open it, once, and
stays open until `disable_noisy_ops`, so that backward passes and recomputations find it open. Raw tensor calls outside
modules are not noised, nor are functions that torch.compile compiled before. Settings act at once, in other threads
from their next forward on; a backward pass has the settings of its forward. Every enable starts the noise of its seed
from the beginning and all counts from zero; counts outlive disable; selections, scales and phases outlive both.

In this file "matmul" means all matrix products (linear, matmul, bmm). `None` selects everything (the products, and with
`all_ops_mode` softmax, silu, gelu and norm too), `[]` switches noise off on purpose.

This is the one file of noisescope that owns global state: `_state`, guarded by its lock. While enabled it also replaces
`torch.nn.Module.__call__`: torch binds `forward` before it runs forward pre-hooks, so a door opened from one would miss
the very call it was opened for.

Environment (read when this file is imported, never by `import noisescope`): NOISESCOPE_ENABLED, _SCALE, _TYPE,
_ALL_OPS, _FORWARD_ONLY, _BACKWARD_ONLY (both = both phases), _LAYERS ("0,5,9-11", of the first model with blocks that
is called), _OPERATORS, _SEED; the first six also as VERL_NOISY_OPS_... `python -m noisescope.noisy_ops script.py ARGS`
runs a script with noise on and prints the counts to stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import runpy
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from noisescope.anatomy import Anatomy, dissect
from noisescope.errors import InvalidInput, ModelHeld, NoisescopeError, NothingInjected, unknown
from noisescope.injection import Injection, Perturbation
from noisescope.probe.door import _in_backward, unwrap
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Bias, Gaussian, Uniform
from noisescope.probe.stand_in import StandIn
from noisescope.probe.tally import SiteCount, Tally
from noisescope.sites import GROUPS, PHASES, Place, canonical_operator, matches_operator

ERROR_TYPES: dict[str, Callable[[float], Perturbation]] = {
    "relative_gaussian": Gaussian,
    "rms_gaussian": lambda scale: Gaussian(scale, "rms"),
    "absolute_gaussian": lambda scale: Gaussian(scale, "absolute"),
    "uniform": Uniform,
    "systematic_bias": Bias,
}
_ALL_OPS = frozenset({"gemm", "softmax", "silu", "gelu", "norm"})
_Counts = Counter[tuple[str, Place, str]]  # (view, layer or operator, phase)
_NO_BLOCKS = ("",)  # what dissect says of a module without blocks: one block, the module itself


@dataclass(frozen=True)
class _Settings:
    scale: float = 0.05
    kind: str = "relative_gaussian"
    all_ops: bool = False
    seed: int = 0
    forward: bool = True
    backward: bool = True
    layers: frozenset[int] | None = None
    operators: frozenset[str] | None = None
    operator_scales: Mapping[str, float] = field(default_factory=dict)
    layer_scales: Mapping[Place, float] = field(default_factory=dict)

    @property
    def off(self) -> bool:
        """Switched off on purpose, by an empty selection."""
        return self.layers == frozenset() or self.operators == frozenset()

    def wanted(self) -> frozenset[str]:
        if self.operators is not None:
            return self.operators
        return _ALL_OPS if self.all_ops else frozenset({"gemm"})

    def injection(self, anatomy: Anatomy | None = None, *, numbered: bool = True) -> Injection:
        """Multipliers carry the absolute scale of every place, so that an error_scale of 0 is no special case."""
        if self.kind not in ERROR_TYPES:
            raise unknown("error type", self.kind, ERROR_TYPES)
        scales: dict[Place, float] = dict(self.layer_scales) if numbered else {}
        for place in anatomy.places() if anatomy else ():
            scales.setdefault(place, self.scale)
        return Injection(
            ERROR_TYPES[self.kind](self.scale),
            operators=self.wanted(),
            layers=self.layers & set(range(len(anatomy.blocks))) if anatomy and self.layers else self.layers,
            phases=frozenset(phase for phase in PHASES if getattr(self, phase)) or frozenset(PHASES),
            phase_scales=dict.fromkeys(PHASES, 1.0),
            operator_multipliers=self.operator_scales,
            layer_multipliers=scales,
            seed=self.seed,
        )


@dataclass
class _Root:
    """An opened module. Its door lives as long as the module does; only the counts are held here."""

    door: weakref.ref[Probe]
    tally: Tally
    anatomy: Anatomy
    numbered: bool  # its block numbers are layer numbers
    forwards: int  # accounted for so far
    stale: bool = False  # its thread has yet to bring it up to the settings


class _State:
    """All that is global here. Public functions hold `lock` while they touch it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings = _Settings()
        self.registered: weakref.WeakKeyDictionary[nn.Module, Anatomy] = weakref.WeakKeyDictionary()
        self.register_first = False  # the environment names layers: the first model with blocks gives them a meaning
        self.counts: _Counts = Counter()
        self.watcher: Callable[..., Any] | None = None  # what stands in nn.Module.__call__ while enabled
        self._begin()

    def _begin(self) -> None:
        self.roots: list[_Root] = []
        self.inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of open roots
        self.ignored: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # looked at: nothing there is aimed at
        self.forwards: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # of roots now closed
        self.fired = self.was_off = self.ran = self.any_stale = False
        self.missed: dict[str, None] = {}  # classes of the modules called in vain since the last turn
        self.problem: NothingInjected | None = None

    # -- settings

    def change(self, *, enable: bool = False, restart: bool = False, **changes: Any) -> None:
        """New settings; while enabled they act at once."""
        settings = dataclasses.replace(self.settings, **changes)
        settings.injection()  # refuses bad values before anything changes
        enabled = self.watcher is not None
        self._check_layers(settings, must_be_registered=enabled or enable)
        if enabled:
            self.turn()
        if enable:
            self.counts.clear()
        if restart:
            self._close_all()
            self.forwards.clear()
        if enable and not enabled:
            self._begin()
            self._watch()
        before, self.settings = self.settings, settings
        try:
            self._refresh()
        except BaseException:
            self.settings = before
            self._refresh()
            raise

    def stop(self, *, check: bool) -> None:
        if self.watcher is None:
            return
        error: Exception | None = None
        try:
            with contextlib.ExitStack() as then:
                then.callback(self._close_all)
                self.turn(final=True)
        except Exception as caught:
            error = caught
        if nn.Module.__call__ is self.watcher:  # else somebody wrapped it since: ours passes everything on from now
            nn.Module.__call__ = self.original  # type: ignore[method-assign]
        self.watcher = None
        if not (self.fired or self.problem or self.was_off):
            self.problem = _nothing("no module was called while noisy ops were enabled")
        error = error or self.problem
        self._begin()
        if check and error is not None:
            raise error

    def _check_layers(self, settings: _Settings, *, must_be_registered: bool) -> None:
        depth = max((len(anatomy.blocks) for anatomy in self.registered.values()), default=0)
        if settings.layers and must_be_registered and not depth and not self.register_first:
            raise InvalidInput(
                "layers are selected, but no model is registered, so their numbers mean nothing yet: call "
                "register_layer_hooks(model) first, or set_selective_layers(None)"
            )
        for layer in (*(settings.layers or ()), *(p for p in settings.layer_scales if isinstance(p, int))):
            if depth and layer >= depth:
                raise InvalidInput(
                    f"layer {layer} is out of range: the registered model has {depth} blocks, 0 to {depth - 1}"
                )

    def _watch(self) -> None:
        original = self.original = nn.Module.__call__
        uncompiled = torch.compiler.disable(self.meet)  # type: ignore[no-untyped-call]

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.watcher is call:
                if torch.compiler.is_compiling():  # break the graph here; the door then keeps the model eager
                    uncompiled(module)
                else:
                    self.meet(module)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = self.watcher = call  # type: ignore[method-assign]

    # -- modules

    def meet(self, module: nn.Module) -> None:
        """A module is about to be called: open it if it is the outermost one and something in it is aimed at."""
        with self.lock:
            if self.any_stale:
                self._refresh(only_stale=True)
            if self.watcher is None or module in self.inside or module in self.ignored:
                return
            if _in_backward():  # a recomputation of a forward that nobody noised
                return
            doors = [(root, door) for root, door in self._doors() if door.thread == threading.get_ident()]
            has_parameters = any(True for _ in module.parameters())
            if not has_parameters and any(door.context is not None for _, door in doors):
                return  # `nn.Softmax(-1)(scores)` made inside a forward is part of it
            root = unwrap(module)
            if root in self.inside or root in self.ignored:  # torch.compile's wrapper of a model met already
                return
            members = set(root.modules())
            anatomy = dissect(root, require_blocks=False)
            if self.register_first and not self.registered and anatomy.blocks != _NO_BLOCKS:
                self.registered[root] = anatomy
                self._check_layers(self.settings, must_be_registered=True)
            injection, numbered = self._aim(root, anatomy)
            if injection is None:
                self.ignored |= members
                if has_parameters:
                    self.missed[type(root).__name__] = None
                return
            shared = [(other, door) for other, door in doors if not members.isdisjoint(door.model.modules())]
            for other, door in shared:  # a part called before the whole: its noise would fall twice
                self._close(other, door)
            self._refuse_inside_a_scope(members)
            probe = Probe(root, injection, anatomy=anatomy)
            probe._may_inject_nothing = True  # whether nothing was hit is asked here, of all modules together
            probe._forwards = self.forwards.get(root, 0)
            probe.__enter__()
            self.inside |= members
            self.roots = [r for r in self.roots if r.door() is not None or r.tally.forward or r.tally.backward]
            self.roots.append(_Root(weakref.ref(probe), probe.tally, anatomy, numbered, probe._forwards))

    def _refuse_inside_a_scope(self, members: set[nn.Module]) -> None:
        for stand_in in (module.__dict__.get("forward") for module in members):
            if isinstance(stand_in, StandIn) and stand_in.door.thread == threading.get_ident():
                raise ModelHeld(
                    f"{type(stand_in.door.model).__name__} is called for the first time since enable_noisy_ops() "
                    "inside another scope, and scopes are left in reverse order: call it once before that scope"
                )

    def _aim(self, root: nn.Module, anatomy: Anatomy) -> tuple[Injection | None, bool]:
        """What falls on a root (None: nothing), and whether its block numbers are layer numbers."""
        settings = self.settings
        numbered = anatomy.blocks != _NO_BLOCKS and (not self.registered or self._is_registered(root, anatomy))
        if settings.off or not (settings.forward or settings.backward):
            return None, numbered
        if settings.layers and not (numbered and self.registered):
            return None, numbered
        injection = settings.injection(anatomy, numbered=numbered)
        hits = [(op, u.component) for u in anatomy.units for op in u.operators if injection.selects(u.site(op))]
        present = {name for name in settings.wanted() if any(matches_operator({name}, *hit) for hit in hits)}
        return (dataclasses.replace(injection, operators=frozenset(present)) if present else None), numbered

    def _is_registered(self, root: nn.Module, anatomy: Anatomy) -> bool:
        """Whether a root has the blocks of a registered model: it may be that model, its body, or a wrapper of it."""
        blocks = [root.get_submodule(name) for name in anatomy.blocks]
        for model, known in self.registered.items():
            theirs = [model.get_submodule(name) for name in known.blocks]
            if blocks == theirs:
                return True
            if set(blocks) & set(theirs) and (self.settings.layers or self.settings.layer_scales):
                raise InvalidInput(
                    f"register_layer_hooks was given {type(model).__name__} with {len(theirs)} blocks, but the module "
                    f"called, {type(root).__name__}, has {len(blocks)} and counts them otherwise: register that one"
                )
        return False

    def _doors(self) -> list[tuple[_Root, Probe]]:
        """The roots open now."""
        doors = [(root, root.door()) for root in self.roots]
        return [(root, door) for root, door in doors if door is not None and door.thread is not None]

    def _refresh(self, *, only_stale: bool = False) -> None:
        """Bring open modules up to the settings, and look again at the ignored ones."""
        if not only_stale:
            self.ignored.clear()
        for root, door in self._doors():
            if root.stale or not only_stale:
                root.stale = door.thread != threading.get_ident() or (only_stale and door.context is not None)
                if not root.stale:  # else it may be in the middle of a forward
                    self._update(root, door)
        self.any_stale = any(root.stale for root, _ in self._doors())

    def _update(self, root: _Root, door: Probe) -> None:
        injection, root.numbered = self._aim(door.model, root.anatomy)
        if injection is None:
            self._close(root, door)
        else:
            door.update(injection)

    def _close(self, root: _Root, door: Probe) -> None:
        self._note_forwards(root, door)
        self.forwards[door.model] = door._forwards  # or a module closed and opened again would repeat its noise
        self.inside -= set(door.model.modules())
        door.__exit__(None, None, None)

    def _close_all(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # also after one that another scope stands on
            for root, door in self._doors():
                all_of_them.callback(self._close, root, door)

    # -- counts

    def turn(self, *, final: bool = False) -> None:
        """Settings are about to change: note what was aimed at and not hit under them, and put the counts away.

        Under backward noise alone that can only be known in the end: a backward pass may be yet to come.
        """
        for root, door in self._doors():
            self._note_forwards(root, door)
        fired = [(root, site) for root in self.roots for site in root.tally.sites if site.total]
        if self.settings.off:
            self.was_off = True
        elif (self.ran or self.missed) and (final or (self.settings.forward and not self._busy())):
            self.problem = self.problem or self._not_hit(fired)
        self.fired |= bool(fired)
        self._add_to(self.counts, take=True)
        for root in self.roots:
            root.tally.looked.clear()  # under new settings each site is looked at anew
            for site in root.tally.sites:
                site.rounded_away = None
                site.samples.clear()
        for stand_in in [stand_in for _, door in self._doors() for stand_in in door._stand_ins.values()]:
            stand_in.calls = 0
        self.roots = [root for root in self.roots if root.door() is not None]
        self.ran, self.missed = False, {}

    def _busy(self) -> bool:
        """Whether a forward may be under way, so that what it aims at is not yet hit."""
        here = threading.get_ident()
        return any(door.thread != here or door.context is not None for _, door in self._doors())

    def _note_forwards(self, root: _Root, door: Probe) -> None:
        self.ran |= door._forwards > root.forwards
        root.forwards = door._forwards

    def _not_hit(self, fired: list[tuple[_Root, SiteCount]]) -> NothingInjected | None:
        settings = self.settings
        if not settings.forward and not settings.backward:
            return _nothing("set_noise_phases switched both phases off")
        if not settings.forward and not fired:
            return _nothing("only the backward phase is on, and no backward pass ran (or nothing there has a gradient)")
        called = ", ".join({root.anatomy.architecture: None for root in self.roots} | self.missed)
        sites = {(site.operator, site.module) for _, site in fired}
        units = [(op, unit) for root in self.roots for unit in root.anatomy.units for op in unit.operators]
        hits = {(op, unit.component) for op, unit in units if (op, unit.module) in sites}
        named = sorted(settings.operators or () if fired else settings.wanted())
        silent = [_shown(name) for name in named if not any(matches_operator({name}, *hit) for hit in hits)]
        if fired:
            places = {site.place for root, site in fired if root.numbered}
            silent += [f"layer {layer}" for layer in sorted(settings.layers or ()) if layer not in places]
        elif settings.layers:
            silent.append(f"layers {sorted(settings.layers)}")
        if silent:
            return _nothing(f"{', '.join(silent)} never fired in the modules called ({called})")
        try:
            for _, door in self._doors():
                door._ran = door._operators_that_ran()
                door._check_unseen()
            for _, door in self._doors()[:1]:  # any of them knows how to look at rounding
                door._check_rounding([site for _, site in fired], "all")
        except NothingInjected as error:
            return error
        return None

    def _add_to(self, counts: _Counts, *, take: bool = False) -> _Counts:
        for root, site in [(r, s) for r in self.roots for s in r.tally.sites]:
            in_block = root.numbered and isinstance(site.place, int)
            views: list[tuple[str, Place]] = [("total", ""), ("layer", site.place) if in_block else ("outside", "")]
            if site.operator in GROUPS["gemm"][0]:
                views.append(("operator", "matmul"))
            if site.operator != "matmul":
                views.append(("operator", site.operator))
            forward, backward = site.forward, site.backward
            for view, key in views:
                counts[view, key, "forward"] += forward
                counts[view, key, "backward"] += backward
            if take:  # not `= 0`: another thread may have counted on meanwhile
                site.forward -= forward
                site.backward -= backward
        return counts

    def view(self, view: str) -> dict[Any, dict[str, int]]:
        """Counts per layer or operator, only of what fired."""
        with self.lock:
            counts = self._add_to(self.counts.copy())
        keys = sorted({key for kind, key, _ in counts if kind == view})
        found = {key: {phase: counts[view, key, phase] for phase in PHASES} for key in keys}
        return {key: phases for key, phases in found.items() if any(phases.values())}

    def reset(self, *views: str) -> None:
        with self.lock:
            self.turn()
            self.counts = Counter({key: n for key, n in self.counts.items() if key[0] not in views})


_state = _State()


def enable_noisy_ops(
    error_scale: float = 0.05,
    error_type: str = "relative_gaussian",
    all_ops_mode: bool = False,
    seed: int | None = None,
) -> None:
    """Noise on, in every module this process calls from now on.

    error_type: "relative_gaussian" (y + s |y| z), "rms_gaussian" (s times the token's rms), "absolute_gaussian" (s z),
    "uniform" (relative, bounded by 1.73 s), "systematic_bias" (y + s sign(y)). Without a seed it is
    `torch.initial_seed()`, which is only read. Enabling again while enabled changes the settings and goes on in the
    noise, unless a seed is given: that begins anew.
    """
    with _state.lock:
        fresh = torch.initial_seed() if seed is None else seed
        restart = seed is not None or fresh != _state.settings.seed
        _state.change(
            enable=True, restart=restart, scale=error_scale, kind=error_type, all_ops=bool(all_ops_mode), seed=fresh
        )


def disable_noisy_ops() -> dict[str, int]:
    """Noise off and every module as it was; the counts. Raises NothingInjected if something aimed at was never hit."""
    with _state.lock:
        _state.stop(check=True)
        return get_injection_stats()


@contextlib.contextmanager
def noisy_ops_context(
    error_scale: float = 0.05,
    error_type: str = "relative_gaussian",
    all_ops_mode: bool = False,
    seed: int | None = None,
) -> Iterator[None]:
    """`enable_noisy_ops` for the length of a `with` block."""
    with _state.lock:
        if _state.watcher is not None:
            raise InvalidInput("noisy ops are enabled already, and this context would disable them: disable them first")
        enable_noisy_ops(error_scale, error_type, all_ops_mode, seed)
    try:
        yield
    except BaseException:  # says more than a count of zero would
        with _state.lock:
            _state.stop(check=False)
        raise
    disable_noisy_ops()


def set_noise_phases(forward: bool = True, backward: bool = True) -> None:
    """Noise in forward passes, in backward passes, or both."""
    with _state.lock:
        _state.change(forward=bool(forward), backward=bool(backward))


def get_noise_phases() -> dict[str, bool]:
    return {"forward": _state.settings.forward, "backward": _state.settings.backward}


def register_layer_hooks(model: nn.Module) -> int:
    """Give layer numbers a meaning: the blocks of this model, counted from 0. Returns how many there are.

    Only a weak reference is kept. Several models may be registered; noise by layer then falls on each.
    """
    with _state.lock:
        anatomy = dissect(model)
        _state.registered[unwrap(model)] = anatomy
        _state.change()
        return len(anatomy.blocks)


def set_selective_layers(layers: Iterable[int] | int | None = None) -> None:
    """Noise in these blocks only; None for everywhere, [] for nowhere. Needs register_layer_hooks(model)."""
    chosen = None if layers is None else Injection(Gaussian(0.0), layers=layers).layers  # type: ignore[arg-type]
    with _state.lock:
        _state.change(layers=chosen)


def get_selective_layers() -> list[int] | None:
    layers = _state.settings.layers
    return None if layers is None else sorted(layers)


def should_inject_for_layer(layer: int) -> bool:
    """Whether the selection includes this block."""
    layers = _state.settings.layers
    return layers is None or layer in layers


def set_selective_operators(operators: Iterable[str] | str | None = None) -> None:
    """Noise in these operators or groups only, whatever all_ops_mode says; None for all, [] for none."""
    names = [operators] if isinstance(operators, str) else operators
    chosen = None if names is None else frozenset(_operator(name) for name in names)
    with _state.lock:
        _state.change(operators=chosen)


set_selective_ops = set_selective_operators


def get_selective_operators() -> list[str] | None:
    operators = _state.settings.operators
    return None if operators is None else sorted(_shown(name) for name in operators)


def should_inject_for_operator(name: str) -> bool:
    """Whether the selection includes this operator, or part of this group; while enabled, all_ops_mode has its say."""
    asked = _parts(_operator(name))
    with _state.lock:
        if _state.settings.operators is None and _state.watcher is None:
            return True
        return any(asked & _parts(chosen) for chosen in _state.settings.wanted())


def set_operator_noise_scales(scales: Mapping[str, float] | None) -> None:
    """Multipliers on the error scale, {"softmax": 0.2}; operators not named keep theirs. None: 1.0 for all again."""
    with _state.lock:
        known = {} if scales is None else dict(_state.settings.operator_scales)
        _state.change(operator_scales=known | {_operator(name): scale for name, scale in (scales or {}).items()})


def set_per_layer_scales(scales: Mapping[int, float] | None) -> None:
    """Absolute error scales of blocks, {9: 0.02}; all others have error_scale. None or {}: error_scale everywhere."""
    Injection(Gaussian(0.0), layers=frozenset(p for p in scales or () if isinstance(p, int)))  # refuses negative ones
    with _state.lock:
        _state.change(layer_scales=dict(scales or {}))


def get_injection_stats() -> dict[str, int]:
    """Injections since the last enable or reset: in total, and of these outside blocks (lm_head, a lone MLP)."""
    views = {view: _state.view(view).get("", {}) for view in ("total", "outside")}
    return {f"{view}_{phase}": counts.get(phase, 0) for view, counts in views.items() for phase in PHASES}


def get_layer_injection_stats() -> dict[int, dict[str, int]]:
    """{layer: {"forward": n, "backward": m}} of the blocks of registered models, or of any model if none is."""
    return _state.view("layer")


def get_operator_injection_stats() -> dict[str, dict[str, int]]:
    """{operator: {"forward": n, "backward": m}}; "matmul" counts every product, "linear" and "bmm" its parts again."""
    return _state.view("operator")


def reset_injection_stats() -> None:
    """All counts from zero."""
    _state.reset("total", "outside", "layer", "operator")


def reset_layer_injection_stats() -> None:
    _state.reset("layer")


def reset_operator_injection_stats() -> None:
    _state.reset("operator")


def print_injection_summary(file: TextIO | None = None) -> None:
    """The counts as a table, on stdout if no file is given."""
    stats = get_injection_stats()
    rows = {"injections": {phase: stats[f"total_{phase}"] for phase in PHASES}, **get_operator_injection_stats()}
    rows |= {f"layer {layer}": counts for layer, counts in get_layer_injection_stats().items()}
    rows["outside blocks"] = {phase: stats[f"outside_{phase}"] for phase in PHASES}
    for name, counts in rows.items():
        print(f"noisescope: {name:<14} forward {counts['forward']:>8} backward {counts['backward']:>8}", file=file)


def _operator(name: str) -> str:
    """The canonical name, where "matmul" means all products."""
    canonical = canonical_operator(name)
    return "gemm" if canonical == "matmul" else canonical


def _shown(name: str) -> str:
    return "matmul" if name == "gemm" else name


def _parts(name: str) -> frozenset[str]:
    return GROUPS[name][0] if name in GROUPS else frozenset({name})


def _nothing(why: str) -> NothingInjected:
    return NothingInjected(
        f"nothing was injected: {why}. Noise falls on calls of torch.nn.Module between enable_noisy_ops() and "
        "disable_noisy_ops(), not on raw tensor calls outside modules. To switch noise off on purpose, select []."
    )


# -- the environment, and `python -m noisescope.noisy_ops`

_ALIASED = ("ENABLED", "SCALE", "TYPE", "ALL_OPS", "FORWARD_ONLY", "BACKWARD_ONLY")
_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def _read(name: str, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of an environment variable; None where it is not set, or empty."""
    for variable in (f"NOISESCOPE_{name}", *([f"VERL_NOISY_OPS_{name}"] if name in _ALIASED else [])):
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                return parse(text)
            except (ValueError, KeyError) as error:
                why = f"allowed: {', '.join(_FLAGS)}" if isinstance(error, KeyError) else error
                raise InvalidInput(f"environment variable {variable}={text!r}: {why}") from None
    return None


def _error_type(text: str) -> str:
    _Settings(kind=text).injection()
    return text


def _flag(text: str) -> bool:
    return _FLAGS[text.lower()]


def _select_layers(text: str) -> None:
    ends = [part.partition("-") for part in text.split(",")]
    try:
        layers = [n for first, dash, last in ends for n in range(int(first), int(last if dash else first) + 1)]
    except ValueError:
        raise InvalidInput("expected block numbers such as 0,5,9-11") from None
    _state.register_first = True
    set_selective_layers(layers)


def _read_environment(*, enabled: bool = False) -> None:
    """Take settings from the environment; enable if it says so, or if `enabled` does and it does not object."""
    with _state.lock:
        forward_only, backward_only = _read("FORWARD_ONLY", _flag), _read("BACKWARD_ONLY", _flag)
        if bool(forward_only) != bool(backward_only):
            set_noise_phases(forward=bool(forward_only), backward=bool(backward_only))
        _read("OPERATORS", lambda text: set_selective_operators(text.split(",")))
        _read("LAYERS", _select_layers)
        scale = _read("SCALE", lambda text: Gaussian(float(text)).scale)  # which refuses bad numbers
        kind = _read("TYPE", _error_type)
        all_ops, seed = _read("ALL_OPS", _flag), _read("SEED", int)
        wanted = _read("ENABLED", _flag)
        if enabled if wanted is None else wanted:
            enable_noisy_ops(0.05 if scale is None else scale, kind or "relative_gaussian", bool(all_ops), seed)


def _say_at_exit() -> None:
    """Nobody disables what the environment enabled: say so if it did nothing."""
    try:
        disable_noisy_ops()
    except NoisescopeError as error:
        print(f"noisescope: {error}", file=sys.stderr)


def _main(arguments: list[str]) -> Any:
    """Run a script with noise on. The exit code is the script's, or 2 where nothing was injected."""
    if not arguments or not Path(arguments[0]).is_file():
        came = f"no file {arguments[0]!r}; " if arguments else ""
        print(f"noisescope: {came}usage: python -m noisescope.noisy_ops SCRIPT.py [ARGUMENTS...]", file=sys.stderr)
        return 2
    _read_environment(enabled=True)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as `python script.py` has it
    code: Any = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    finally:
        print_injection_summary(sys.stderr)
    try:
        disable_noisy_ops()
    except NoisescopeError as error:
        print(f"noisescope: {error}", file=sys.stderr)
        code = code or error.exit_code
    return code


if __name__ == "__main__":
    try:  # this copy is "__main__", but what the script imports is the other one: that one must do the work
        from noisescope import noisy_ops

        sys.exit(noisy_ops._main(sys.argv[1:]))
    except InvalidInput as error:
        print(f"noisescope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
else:
    _read_environment()
    if _state.watcher is not None:
        atexit.register(_say_at_exit)
