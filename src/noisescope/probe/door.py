"""The one door that alters a model: it puts a stand-in before the `forward` of chosen modules, and takes it away again.

An instance attribute `forward` is what works everywhere: forward hooks are ignored by already compiled code and have no
say over what a module's functions do. What stood in `module.__dict__` before (accelerate keeps its own forward there)
is called by the stand-in and put back on leaving. State hangs on the door and its stand-ins, never in a thread-local:
on a GPU, backward passes and recomputations run in autograd's own threads.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import ATTENTION, CALLS, MODULE, Anatomy, Unit, dissect
from noisescope.errors import InvalidInput, ModelHeld
from noisescope.probe.aims import Aim, Context
from noisescope.probe.attention import decomposed_config, multihead
from noisescope.probe.draws import Rows
from noisescope.probe.functions import OperatorCalls, WeightUse
from noisescope.sites import Place

_ABSENT = object()
_REMEMBERED = 256  # forwards a module keeps for recomputation (gradient accumulation holds several at once)
_entering = threading.Lock()  # two threads must not both find a model free


def unwrap(model: Any) -> nn.Module:
    """The module behind torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", model)
    return inner  # type: ignore[no-any-return]


class Door:
    """Opens a model on `with`, closes it without a trace. Subclasses say what happens at each operator."""

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None) -> None:
        self.model = unwrap(model)
        self.anatomy = anatomy or dissect(self.model)
        self.context: Context | None = None  # the forward that runs now
        self.owner: OperatorCalls | None = None  # the function mode in charge now
        self.thread: int | None = None
        self.compiled = False
        self._stand_ins: dict[nn.Module, StandIn] = {}
        self._forwards = 0
        self._named: tuple[Tensor, Tensor | int | None] | None = None
        self._next_position = 0
        self._recalled: Context | None = None

    # -- for subclasses

    def aim_at(self, unit: Unit, operator: str) -> Aim | None:
        """What to do at an operator of a unit; None leaves it alone."""
        raise NotImplementedError

    # -- opening and closing

    def _open(self) -> None:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        with _entering:
            if self.thread is not None:
                raise ModelHeld("this scope is open already; make a new one for each `with`")
            for module in self.model.modules():
                held = module.__dict__.get("forward")
                if isinstance(held, StandIn) and held.door.thread != threading.get_ident():
                    raise ModelHeld(
                        f"another thread holds a scope on this {type(self.model).__name__}. "
                        "Give each thread its own copy of the model, or wait until that scope is left."
                    )
            self.thread = threading.get_ident()
            try:
                self._install(modules)
            except BaseException:
                self._close()
                raise

    def _install(self, modules: dict[str, nn.Module]) -> None:
        """Aim at every selected operator; modules that have a stand-in already keep it and get new aims."""
        for stand_in in self._stand_ins.values():
            stand_in.aims = {}
        aimed: set[Place] = set()
        for unit in self.anatomy.units:
            for operator in unit.operators:
                aim = self.aim_at(unit, operator)
                if aim is not None:
                    self._stand_in(modules[unit.module], unit.kind).aims.setdefault(unit.place, {})[operator] = aim
                    aimed.add(unit.place)
        for index, name in enumerate(self.anatomy.blocks):
            if index in aimed:
                self._stand_in(modules[name], MODULE).block = index
        for module in modules.values():  # the fused fast path of these is left while a function mode is on
            if aimed and isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
                self._stand_in(module, CALLS)
        self._shield(modules)
        self._stand_in(self.model, MODULE).root = True

    def _shield(self, modules: dict[str, nn.Module]) -> None:
        """Operators inside a watched module are their own business: the watcher must not see how they are made."""
        watched = [name for name, module in modules.items() if self._watches(module)]
        for unit in self.anatomy.units:
            inside = any(unit.module.startswith(f"{name}.") or not name for name in watched)
            if inside and unit.module and (unit.kind != CALLS and unit.operators != ("residual",)):
                self._stand_in(modules[unit.module], unit.kind)

    def _watches(self, module: nn.Module) -> bool:
        stand_in = self._stand_ins.get(module)
        return stand_in is not None and stand_in.kind != MODULE

    def _stand_in(self, module: nn.Module, kind: str) -> StandIn:
        stand_in = self._stand_ins.get(module)
        if stand_in is None:
            stand_in = self._stand_ins[module] = StandIn(self, module)
            module.__dict__["forward"] = stand_in
        elif module.__dict__.get("forward") is not stand_in and kind != MODULE and stand_in.kind == MODULE:
            raise ModelHeld("update() can't reach new functions while an inner scope is open on the same model")
        if kind != MODULE:
            stand_in.watch(kind)
        return stand_in

    def _close(self) -> None:
        """Put back what stood there. Never raises before every module is restored."""
        strangers = []
        for module, stand_in in reversed(list(self._stand_ins.items())):
            if module.__dict__.get("forward") is not stand_in:
                strangers.append(stand_in)
            elif stand_in.replaced is _ABSENT:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = stand_in.replaced
            stand_in.retire()
        self._stand_ins.clear()
        self.thread = None
        if strangers:
            raise ModelHeld(
                "scopes must be left in the reverse order of entering: another stand-in was put on "
                f"{type(strangers[0].module).__name__} inside this scope and is still there"
            )

    # -- rows

    def rows(self, samples: Iterable[int] | Tensor, positions: Tensor | int | None = None) -> None:
        """Name the rows of the forwards that follow: sample ids [B], and positions [B, T] or the first one.

        Without positions they are taken from the call's `position_ids`, or counted on from forward to forward.
        """
        ids = samples if isinstance(samples, Tensor) else torch.tensor(list(samples))
        if ids.dim() != 1 or ids.is_floating_point() or ids.numel() == 0:
            raise InvalidInput(f"samples must be a list of ints, one for each row of the batch; got {samples!r}")
        self._named = (ids, positions)
        self._next_position = positions if isinstance(positions, int) else 0

    def unname_rows(self) -> None:
        """Back to rows known by (forward number, row)."""
        self._named = None

    def new_context(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Context:
        self._forwards += 1
        rows = Rows(self._forwards)
        if self._named is not None:
            rows.samples, rows.positions = self._name_tokens(args, kwargs or {})
        return Context(rows, grad=torch.is_grad_enabled())

    def _name_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert self._named is not None
        samples, positions = self._named
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() >= 2), None)
        if tokens is None:
            raise InvalidInput("rows() names a batch, but the model was called without a tensor of [batch, tokens]")
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

    def context_of(self, stand_in: StandIn, x: Any) -> Context:
        """The forward a module runs in: the model's, a recomputed one, or (called on its own) a new one."""
        if self.context is not None:
            return self.context
        if _in_backward():
            place = next(iter(stand_in.aims), stand_in.block)
            known = stand_in.recall(x)
            if known is not None:
                self._recalled = Context(known.rows, known.place, recomputing=True, grad=True)
            if self._recalled is not None and self._recalled.place == place:
                return self._recalled
        return self.new_context()


def _in_backward() -> bool:
    """Whether autograd runs in this thread now: only then is a forward a recomputation."""
    return torch._C._current_graph_task_id() != -1


class StandIn:
    """Stands in `module.__dict__["forward"]` while a door is open."""

    def __init__(self, door: Door, module: nn.Module) -> None:
        self.door = door
        self.module = module
        self.replaced = module.__dict__.get("forward", _ABSENT)
        self.original: Callable[..., Any] = module.forward
        self.aims: dict[Place, dict[str, Aim]] = {}
        self.kind = MODULE
        self.block: int | None = None
        self.root = False
        self._routed: Any = None
        self._remembered: dict[tuple[Any, ...], Context] = {}
        self._set_compiler_aside = torch.compiler.disable(self._run_uncompiled)
        functools.update_wrapper(self, self.original, updated=())  # keeps the signature: generate() and Trainer read it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo traces us: break the graph here and run as plain Python
            return self._set_compiler_aside(*args, **kwargs)
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ModelHeld(
            "the model can't be copied or pickled inside a noisescope scope: the copy would call into the original. "
            "Leave the scope first. (save_pretrained and state_dict are fine.)"
        )

    def __reduce__(self) -> Any:
        return self.__deepcopy__(None)

    def watch(self, kind: str) -> None:
        """This module's own function calls are operators."""
        self.kind = kind
        if kind == ATTENTION:
            self._routed = decomposed_config(self.module)

    def retire(self) -> None:
        """Pass everything through from now on, and let go of what was held (a cycle would keep device memory)."""
        self._run = self._set_compiler_aside = self.original  # type: ignore[method-assign]
        self.aims = {}
        self._remembered.clear()

    # -- running

    def _run_uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        self.door.compiled = True
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.root:
            return self._run_root(args, kwargs)
        return self._run_inner(args, kwargs)

    def _run_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        door = self.door
        if threading.get_ident() != door.thread:
            raise ModelHeld(
                "this model is held by a noisescope scope of another thread (nn.DataParallel calls replicas that way): "
                "run it in the thread that opened the scope, or give each thread its own copy"
            )
        if door.context is not None:  # the model calls itself
            return self._run_inner(args, kwargs)
        door.context = door.new_context(args, kwargs)
        try:
            return self._run_inner(args, kwargs)
        finally:
            door.context = None

    def _run_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.block is None and not self.aims and self.kind == MODULE:
            return self._run_shield(args, kwargs) if not self.root else self.original(*args, **kwargs)
        door = self.door
        x = _first_tensor(args, kwargs)
        outer = door.context
        context = door.context_of(self, x)
        if context.grad and not context.recomputing:
            self._remember(x, context)
        if self.block is not None and context.place is None:
            context = Context(context.rows, self.block, recomputing=context.recomputing, grad=context.grad)
        door.context = context
        try:
            return self._run_operator(args, kwargs, context)
        finally:
            door.context = outer

    def _run_shield(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        door = self.door
        owner, door.owner = door.owner, None
        try:
            return self.original(*args, **kwargs)
        finally:
            door.owner = owner

    def _run_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
        """The module as one operator (its own aim), around the functions it calls (the other aims)."""
        door = self.door
        aims = self._aims_here(context)
        own = aims.get("residual") if self.block is not None else None
        if self.kind == MODULE and self.block is None:
            own = next(iter(aims.values()), None)
        owner = door.owner
        door.owner = None
        try:
            if own is None:
                return self._call(args, kwargs, aims, context)
            occurrence = context.occurrence(own)
            args, kwargs, tapped = self._on_inputs(own, args, kwargs, context, occurrence)
            grad = torch.is_grad_enabled()
            if own.wants_weight or (grad and own.backward is not None):
                use = functools.partial(self._on_weight, own, context, occurrence, not tapped)
                with WeightUse(self.module, use):
                    y = self._call(args, kwargs, aims, context)
            else:
                y = self._call(args, kwargs, aims, context)
            return own.on_output(y, context, occurrence, fresh=not grad and self.block is None)
        finally:
            door.owner = owner

    def _aims_here(self, context: Context) -> dict[str, Aim]:
        """The aims of the block we are in; a module shared by several blocks has aims for each."""
        if len(self.aims) == 1:
            return next(iter(self.aims.values()))
        return self.aims.get(context.place, {})

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], aims: dict[str, Aim], context: Context) -> Any:
        """The original forward, with its function calls watched where that is asked for."""
        if self.kind == MODULE:
            return self.original(*args, **kwargs)
        door = self.door
        calls = OperatorCalls(door, self.kind, aims, context)
        door.owner = calls
        with calls:
            if isinstance(self.module, nn.MultiheadAttention):
                return multihead(self.module, *args, **kwargs)
            if self._routed is None or not (aims.keys() & {"matmul", "bmm", "softmax"}):
                return self.original(*args, **kwargs)
            config = self.module.__dict__["config"]
            self.module.__dict__["config"] = self._routed
            try:
                return self.original(*args, **kwargs)
            finally:
                self.module.__dict__["config"] = config

    def _on_inputs(
        self, aim: Aim, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context, occurrence: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """The first tensor given, perturbed or tapped; whether a gradient tap was set."""
        grad = aim.backward is not None and torch.is_grad_enabled()
        if not aim.wants_input and not grad:
            return args, kwargs, False
        x = _first_tensor(args, kwargs)
        if not isinstance(x, Tensor) or not (x.is_floating_point() or aim.wants_input):
            return args, kwargs, False
        new = aim.on_input(x, context, occurrence)
        tapped = grad and new.requires_grad
        if tapped:
            new = aim.tap(new, context, occurrence, "input", counts=True)
        if new is not x:
            args = tuple(new if arg is x else arg for arg in args)
            kwargs = {k: new if arg is x else arg for k, arg in kwargs.items()}
        return args, kwargs, tapped

    def _on_weight(self, aim: Aim, context: Context, occurrence: int, counts: bool, weight: Tensor) -> Tensor:
        weight = aim.on_weight(weight, context, occurrence)
        return aim.tap(weight, context, occurrence, "weight", counts=counts) if torch.is_grad_enabled() else weight

    # -- recomputation

    def _remember(self, x: Any, context: Context) -> None:
        if isinstance(x, Tensor):
            if len(self._remembered) >= _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            place = self.block if self.block is not None else context.place
            self._remembered[_identity(x)] = Context(context.rows, place, recomputing=True, grad=True)

    def recall(self, x: Any) -> Context | None:
        """The forward that had this very tensor as input: it is alive while its graph is, so its address is its own."""
        return self._remembered.get(_identity(x)) if isinstance(x, Tensor) else None


def _identity(x: Tensor) -> tuple[Any, ...]:
    return (x.data_ptr(), x.storage_offset(), x.shape)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for arg in args:
        if isinstance(arg, Tensor):
            return arg
    for arg in kwargs.values():
        if isinstance(arg, Tensor):
            return arg
    return None
