"""The one scope that modifies a model: it wraps the `forward` of chosen modules, and unwraps it again.

An instance attribute `forward` works everywhere: already compiled code ignores forward hooks, and hooks can't control
the functions a module calls. A `forward` that was already in `module.__dict__` (accelerate keeps its own there) is
called by the wrapper and restored on leaving. State is kept on the scope and its wrappers, never in a thread-local: on
a GPU, backward passes and recomputations run in autograd's own threads. A scope has one owner: the thread, and in it
the asyncio task, that opened it; all others are rejected. A recomputation belongs to the forward it repeats, whatever
thread it runs in.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any, Self

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, ModelHeld
from noisescope.model.anatomy import ATTENTION, CALLS, MODULE, Anatomy, Unit, dissect
from noisescope.probe.draws import Rows
from noisescope.probe.forward_wrapper import RUN, ForwardWrapper, in_backward, scopes_on
from noisescope.probe.function_mode import DeviceCallMode, OperatorCalls
from noisescope.probe.operator_target import Context, Target
from noisescope.sites import FUSED, Place

_entering = threading.Lock()  # two threads must not both find a model free
_claiming = threading.Lock()  # nor both find that no other is in it
_MOST_NESTED = 16  # a scope takes up to 25 frames of a forward's stack, and Python's limit is 1000

Caller = tuple[int, "asyncio.Task[Any] | None"]


def caller() -> Caller:
    """This thread, and the coroutine (asyncio task) it is running, if any."""
    running = asyncio._get_running_loop() is not None
    return get_ident(), asyncio.current_task() if running else None


def unwrap(model: Any) -> nn.Module:
    """The module behind torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)  # type: ignore[no-any-return]


class _Running:
    """What one thread is running on a model."""

    __slots__ = ("context", "forward", "inside", "owner")

    def __init__(self) -> None:
        self.context: Context | None = None
        self.owner: OperatorCalls | None = None
        self.inside = False
        self.forward = False  # inside for more than a recomputation


class ModelScope:
    """Opens a model on `with`, and closes it without a trace. Subclasses define what happens at each operator."""

    acts_as_device = False  # whether scopes opened later see what this one does to functions: see DeviceCallMode
    any_order = False  # whether it may be left before scopes opened inside it; its wrappers pass everything on then
    any_thread = False  # whether threads other than its owner may call the model, one at a time

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None) -> None:
        self.model = unwrap(model)
        self.mode: DeviceCallMode | None = None
        self.anatomy = anatomy or dissect(self.model)
        self._running: dict[int, _Running] = {}  # by thread
        self.owned_by: Caller | None = None
        self.compiled = False
        self._wrappers: dict[nn.Module, ForwardWrapper] = {}
        self.forwards = 0  # calls of the model so far; unnamed rows are keyed by it
        self._named: tuple[Tensor, Tensor | int | None] | None = None
        self._next_position = 0
        self._recalled: Context | None = None
        self._devices: list[ModelScope] | None = None

    # -- for subclasses

    def target_at(self, unit: Unit, operator: str) -> Target | None:
        """What to do at an operator of a unit; None leaves it unchanged.

        Attention modules are also asked for FUSED: a fused call as a whole, or None for the operators inside it.
        """
        raise NotImplementedError

    def operators_at(self, unit: Unit) -> tuple[str, ...]:
        """What `target_at` is asked about at a unit."""
        return (*unit.operators, *((FUSED,) if unit.kind == ATTENTION else ()))

    def shortcut(self, block: int, x: Any) -> Any:
        """A block's output without running it; RUN runs it."""
        return RUN

    def sleeps(self) -> bool:
        """Whether a call that starts now is ignored, as if the scope were closed."""
        return False

    # -- threads

    def running_here(self) -> _Running:
        thread = get_ident()
        running = self._running.get(thread)
        if running is None:
            running = self._running[thread] = _Running()
        return running

    @property
    def context(self) -> Context | None:
        """The forward that this thread is running."""
        return self.running_here().context

    @context.setter
    def context(self, context: Context | None) -> None:
        running = self.running_here()
        running.context = context
        if context is None:
            running.inside = running.forward = False

    @property
    def owner(self) -> OperatorCalls | None:
        """The function mode in charge of this thread."""
        return self.running_here().owner

    @owner.setter
    def owner(self, owner: OperatorCalls | None) -> None:
        self.running_here().owner = owner

    @property
    def held_elsewhere(self) -> bool:
        """Whether another thread or coroutine holds the model, so that this one can neither open nor call it."""
        return bool(self._others()) if self.any_thread else self.owned_by != caller()

    def check_caller(self) -> None:
        """Raise unless the scope's owner calls, or autograd, which repeats a part of the owner's forward."""
        if not self.any_thread and self.owned_by != caller() and not in_backward():
            raise self._not_the_owner()

    def _not_the_owner(self) -> ModelHeld:
        if self.owned_by is not None and self.owned_by[0] == get_ident():
            who, cure = "coroutine", "open the scope in the coroutine (asyncio task) that calls the model"
        else:
            who, cure = "thread (nn.DataParallel calls replicas that way)", "run it in the thread that opened the scope"
        return ModelHeld(
            f"this model is in use by a noisescope scope of another {who}: {cure}, or give each its own copy"
        )

    def _others(self) -> list[_Running]:
        """What other threads that are inside the model run there."""
        thread = get_ident()
        return [running for at, running in list(self._running.items()) if at != thread and running.inside]

    def _claim(self, *, forward: bool) -> None:
        """Enter the model in this thread, unless another thread is in it.

        Autograd may recompute parts in several threads at once (one for each device), but not beside a forward: modules
        have one config and one set of buffers.
        """
        with _claiming:
            if any(forward or running.forward for running in self._others()):
                raise ModelHeld(
                    f"two threads use this {type(self.model).__name__} at the same time, but a scope allows one "
                    f"forward at a time: give each thread its own copy, or let one wait for the other"
                )
            running = self.running_here()
            running.inside = True
            running.forward |= forward

    # -- opening and closing

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close()

    def _open(self) -> None:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        with _entering:
            if self.owned_by is not None:
                raise ModelHeld("this scope is already open; create a new one for each `with`")
            name = type(self.model).__name__
            for module in modules.values():
                held = scopes_on(module)
                if held and held[0].held_elsewhere:
                    raise ModelHeld(
                        f"another thread or coroutine has a scope open on this {name}. Give each its own copy of "
                        f"the model, or wait until that scope closes."
                    )
                if len(held) >= _MOST_NESTED:
                    raise ModelHeld(
                        f"{len(held)} noisescope scopes are already open on this {name}, and a forward through more "
                        f"would exceed Python's recursion limit ({sys.getrecursionlimit()}): close some of them first"
                    )
            self.owned_by = caller()
            self._devices = None
            try:
                self._install(modules)
                if self.acts_as_device:
                    self.mode = DeviceCallMode(self)
                    self.mode.__enter__()  # type: ignore[no-untyped-call]
            except BaseException:
                self._close()
                raise

    def _install(self, modules: dict[str, nn.Module]) -> None:
        """Install targets at every selected operator; modules that already have a wrapper keep it."""
        targets = [
            (unit, operator, self.target_at(unit, operator))
            for unit in self.anatomy.units
            for operator in self.operators_at(unit)
        ]
        for wrapper in self._wrappers.values():  # from here on nothing can be refused any more
            wrapper.targets, wrapper.calls = {}, 0
        targeted: set[Place] = set()
        homes: dict[nn.Module, set[Place]] = {}  # a module that two blocks share is at home in both
        for unit in self.anatomy.units:
            homes.setdefault(modules[unit.module], set()).add(unit.place)
        for unit, operator, target in targets:
            if target is not None:
                self._wrap(modules[unit.module], unit.kind).targets.setdefault(unit.place, {})[operator] = target
                targeted.add(unit.place)
        for module, wrapper in self._wrappers.items():
            wrapper.shared = len(homes.get(module, ())) > 1
            targeted |= homes[module] if wrapper.shared and wrapper.targets else set()
        for index, name in enumerate(self.anatomy.blocks):
            if index in targeted:
                self._wrap(modules[name], MODULE).block = index
        for module in modules.values():  # the fused fast path of these is left while a function mode is on
            if targeted and isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
                self._wrap(module, CALLS)
        self._shield(modules)
        for name in dict.fromkeys(parent for block in self.anatomy.blocks for parent in _parents(block)):
            if not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
                self._wrap(modules[name], MODULE).root = True  # generate() may call an inner model or an encoder
        self._wrap(self.model, MODULE).root = True
        for wrapper in self._wrappers.values():
            wrapper.find_shortest_path()

    def _shield(self, modules: dict[str, nn.Module]) -> None:
        """Hide the operators inside an observed module: the observer must not see how they are implemented."""
        watching = {module for module, wrapper in self._wrappers.items() if wrapper.kind != MODULE}
        watched = {name for name, module in modules.items() if module in watching} if watching else set()
        for unit in self.anatomy.units if watched else ():
            if not watched.isdisjoint(_parents(unit.module)) and (
                unit.kind != CALLS and unit.operators != ("residual",)
            ):
                self._wrap(modules[unit.module], unit.kind)

    def _wrap(self, module: nn.Module, kind: str) -> ForwardWrapper:
        wrapper = self._wrappers.get(module)
        if wrapper is None:
            wrapper = self._wrappers[module] = ForwardWrapper(self, module)
            module.__dict__["forward"] = wrapper
        elif module.__dict__.get("forward") is not wrapper and kind != MODULE and wrapper.kind == MODULE:
            raise ModelHeld("update() can't reach new functions while an inner scope is open on the same model")
        if kind != MODULE:
            wrapper.watch(kind)
        return wrapper

    @property
    def covered(self) -> bool:
        """Whether a scope that was opened inside this one is still open, so that this one can't be left."""
        return any(module.__dict__.get("forward") is not wrapper for module, wrapper in self._wrappers.items())

    def _close(self) -> None:
        """Restore what was there before. Never raises before every module is restored."""
        strangers = []
        if self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for module, wrapper in reversed(list(self._wrappers.items())):
            if module.__dict__.get("forward") is not wrapper:
                strangers.append(wrapper)
            else:
                wrapper.give_back()
            wrapper.retire()
        self._wrappers.clear()
        self._running = {at: running for at, running in self._running.items() if running.inside}
        self.owned_by = None
        if strangers and not self.any_order:
            raise ModelHeld(
                "scopes must close in the reverse order of opening: another wrapper was put on "
                f"{type(strangers[0].module).__name__} inside this scope and is still there"
            )

    def rerun(self, callee: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module or function again, its operators counted from 0 by the scopes that act as a device.

        Such a scope knows the calls inside one module by their number (0 is q k^T, 1 is P v). A call that is made again
        must have the numbers of the first one, or a simulated fault would not be where it was.
        """
        if self._devices is None:
            self._devices = _device_scopes(self.model)
        contexts = [scope.context for scope in self._devices]
        contexts += [None if scope.owner is None else scope.owner.context for scope in self._devices]
        kept = [(context, context.fired) for context in contexts if context is not None]
        try:
            for context, _ in kept:
                context.fired = {}
            return callee(*args, **kwargs)
        finally:
            for context, fired in reversed(kept):
                context.fired = fired

    # -- rows

    def rows(self, samples: Iterable[int] | Tensor, positions: Tensor | int | None = None) -> None:
        """Name the rows of the forwards that follow: sample ids [B], and positions [B, T] or the first one.

        Without positions they are taken from the call's `position_ids`, or counted on from forward to forward.
        """
        ids = samples if isinstance(samples, Tensor) else torch.tensor(list(samples))
        if ids.dim() != 1 or ids.is_floating_point() or ids.numel() == 0:
            raise InvalidInput(f"samples must be a list of ints, one per row of the batch; got {samples!r}")
        self._named = (ids, positions)
        self._next_position = positions if isinstance(positions, int) else 0

    def new_context(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Context:
        if not self.any_thread and self.held_elsewhere:
            raise self._not_the_owner()
        self._claim(forward=True)
        self.forwards += 1
        self._recalled = None
        rows = Rows(self.forwards)
        if self._named is not None:
            try:
                rows.samples, rows.positions = self._name_tokens(*self._named, args, kwargs or {})
            except BaseException:
                self.context = None
                raise
            kept = (kwargs or {}).get("logits_to_keep")
            rows.kept = kept if isinstance(kept, Tensor) else None  # an int means the last tokens
        return Context(rows, grad=torch.is_grad_enabled())

    def _name_tokens(
        self, samples: Tensor, positions: Tensor | int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() >= 2), None)
        if tokens is None:
            raise InvalidInput("rows() was called, but the model received no tensor of shape [batch, tokens]")
        for name in ("input_ids", "inputs_embeds"):
            if isinstance(kwargs.get(name), Tensor):
                tokens = kwargs[name]
        batch, length = tokens.shape[:2]
        if batch != samples.numel():
            raise InvalidInput(f"rows() names {samples.numel()} samples, but the batch has {batch}: call rows() again")
        if isinstance(positions, Tensor):
            named = positions
        elif positions is None and isinstance(kwargs.get("position_ids"), Tensor):
            named = kwargs["position_ids"]
        else:
            named = torch.arange(self._next_position, self._next_position + length, device=tokens.device)
            self._next_position += length
        if named.shape[-1] != length:
            raise InvalidInput(f"rows() names {named.shape[-1]} positions, but the call has {length} tokens")
        return samples, named.reshape(-1, length).expand(batch, length)

    def context_of(self, wrapper: ForwardWrapper, x: Any) -> Context:
        """The forward a module runs in: the model's, a recomputed one, or (called on its own) a new one."""
        if self.context is not None:
            return self.context
        return self.recalled(wrapper, x) if in_backward() else self.new_context()

    def recalled(self, wrapper: ForwardWrapper, x: Any) -> Context:
        """The forward that autograd is recomputing (gradient checkpointing): the same rows, and no tally."""
        # Threads not started from Python are autograd's: it has one per device, and others in nested calls.
        autograds = isinstance(threading.current_thread(), threading._DummyThread)
        ours = self.any_thread or not self.held_elsewhere or (autograds and not wrapper.root)
        known = ours or wrapper.knows(x)  # a whole forward is recomputed from the very tensors it had
        rows = wrapper.recall(x, None if self._recalled is None else self._recalled.rows) if known else None
        if rows is None:  # a module that ran in no forward of this scope: nothing to repeat
            return self.new_context()
        self._claim(forward=False)
        place = wrapper.block if wrapper.block is not None else next(iter(wrapper.targets), None)
        again = wrapper.block is not None  # a whole block from its start, even if the last one was the same block
        if again or self._recalled is None or self._recalled.rows is not rows or self._recalled.place != place:
            self._recalled = Context(rows, place, recomputing=True, grad=True)
        return self._recalled


def _device_scopes(model: nn.Module) -> list[ModelScope]:
    """The scopes open on a model that act before all others, as a broken device does: simulated faults."""
    open_scopes = {id(scope): scope for module in model.modules() for scope in scopes_on(module)}
    return [scope for scope in open_scopes.values() if scope.acts_as_device]


def _parents(name: str) -> Iterator[str]:
    """Names of the modules that contain a module, including the model itself ("")."""
    while name:
        name = name.rpartition(".")[0]
        yield name
