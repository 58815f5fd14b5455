"""A wrapper for one module's `forward`: it finds the forward it runs in, then calls the original with its targets."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noisescope.errors import UnsupportedModel
from noisescope.model.anatomy import ATTENTION, MODULE, keeps_weight_transposed
from noisescope.probe.draws import Rows
from noisescope.probe.function_mode import OperatorCalls, WeightUse
from noisescope.probe.functions import first_tensor, with_tensor
from noisescope.probe.operator_target import CallListener, Context, Once, OperatorTarget, Target
from noisescope.probe.unfused_attention import decomposed_config, is_users_own, multihead
from noisescope.sites import CACHED, FUSED, WHOLE, Place

if TYPE_CHECKING:
    from noisescope.probe.forward_patching import ModelScope

ABSENT = object()
RUN = object()  # a scope's answer to "what does this block give without being run?": nothing, run it
_CHECKPOINT = "_gradient_checkpointing_func"  # in the `__dict__` of transformers' layers
_REMEMBERED = 256  # forwards a module keeps for recomputation (gradient accumulation holds several at once)


class ForwardWrapper:
    """The value of `module.__dict__["forward"]` while a scope is open."""

    def __init__(self, scope: ModelScope, module: nn.Module) -> None:
        self.scope = scope
        self.module = module
        self.replaced = module.__dict__.get("forward", ABSENT)
        self.original: Callable[..., Any] = module.forward
        self.targets: dict[Place, dict[str, Target]] = {}
        self.kind = MODULE
        self.retired = False
        self.shared = False  # by several blocks: the targets are those of the block that calls
        self.calls = 0
        self.block: int | None = None
        self.root = False
        self._only: Target | None = None
        self._routed: Any = None
        self._remembered: deque[tuple[Any, Rows]] = deque(maxlen=_REMEMBERED)
        self._run_apart_from_the_compiler = _uncompiled_run()
        functools.update_wrapper(self, self.original, updated=())  # keeps the signature: generate() and Trainer read it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo traces us: break the graph here and run as plain Python
            return self._run_apart_from_the_compiler(self, *args, **kwargs)
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        clean = self._beneath()
        if clean is not ABSENT:
            return copy.deepcopy(clean, memo)
        copied = copy.deepcopy(self.module, memo)  # which is being copied: this is an attribute of it
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        """A copy of the model is clean: it has the original forward, or that of its class, and no wrapper."""
        clean = self._beneath()
        return (getattr, (self.module, "forward")) if clean is ABSENT else (operator.getitem, ((clean,), 0))

    def _beneath(self) -> Any:
        """What was there before any scope was opened."""
        replaced = self.replaced
        while isinstance(replaced, ForwardWrapper):
            replaced = replaced.replaced
        return replaced

    def watch(self, kind: str) -> None:
        """This module's own function calls are operators."""
        self.kind = kind
        if kind == ATTENTION:
            self._routed = decomposed_config(self.module)

    def give_back(self) -> None:
        """Restore what was there, or what was there before that if it is no longer in use."""
        replaced = self.replaced
        while isinstance(replaced, ForwardWrapper) and replaced.retired:
            replaced = replaced.replaced
        if replaced is ABSENT:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = replaced

    def retire(self) -> None:
        """Pass everything through from now on, and release what was held (a cycle would keep device memory)."""
        self.retired = True
        self._run = self.original  # type: ignore[method-assign]
        self.targets = {}
        self._remembered.clear()

    # -- running

    def _run_uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        self.scope.compiled = True
        return self._run(*args, **kwargs)

    def find_shortest_path(self) -> None:
        """See whether all there is to do is to perturb the output of an operator, or to report it: the usual case."""
        self._only = None
        if self.kind == MODULE and self.block is None and not self.root and not self.shared and len(self.targets) == 1:
            (targets,) = self.targets.values()
            target = next(iter(targets.values()), None)
            if len(targets) == 1 and WHOLE not in targets:
                output = isinstance(target, OperatorTarget) and target.tensor == "output"
                self._only = target if output or isinstance(target, CallListener) else None

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        target = self._only
        if target is not None and not torch.is_grad_enabled():
            running = self.scope.running_here()
            context = running.context
            if context is not None and not context.grad:  # the root has checked who calls
                self.calls += 1
                owner, running.owner = running.owner, None
                try:
                    if isinstance(target, CallListener):
                        occurrence = context.occurrence(target)
                        return target.run(
                            self.module, self.original, args, kwargs, context=context, occurrence=occurrence
                        )
                    y = self.original(*args, **kwargs)
                finally:
                    running.owner = owner
                return target.on_output(y, context, context.occurrence(target), fresh=True)
        self.scope.check_caller()
        if self.scope.sleeps():
            return self.original(*args, **kwargs)
        if self.root:
            return self._run_root(args, kwargs)
        return self._run_inner(args, kwargs)

    def _run_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scope = self.scope
        if scope.context is not None:  # the model calls itself
            return self._run_inner(args, kwargs)
        x = first_tensor(args, kwargs)
        scope.context = scope.recalled(self, x) if in_backward() else scope.new_context(args, kwargs)
        if not scope.context.recomputing:  # also without gradients: a checkpointed model runs so at first
            self._remember(x, scope.context)
        try:
            return self._run_inner(args, kwargs)
        finally:
            scope.context = None

    def _run_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.block is None and not self.targets and self.kind == MODULE:
            return self._run_shield(args, kwargs) if not self.root else self.original(*args, **kwargs)
        scope = self.scope
        x = first_tensor(args, kwargs)
        if self.block is not None:
            given = scope.shortcut(self.block, x)
            if given is not RUN:
                return given
        outer = scope.context
        context = scope.context = self._context(x)
        try:
            return self._run_operator(args, kwargs, context)
        finally:
            scope.context = outer

    def _context(self, x: Any) -> Context:
        """Of the call of this module that has `x` as its input."""
        context = self.scope.context_of(self, x)
        if context.grad and not context.recomputing and not self.root:
            self._remember(x, context)
        if self.block is not None and context.place is None:
            scratch = context.scratch
            context = Context(context.rows, self.block, recomputing=context.recomputing, grad=context.grad)
            context.scratch = scratch
        return context

    def _run_shield(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scope = self.scope
        if scope.context is None and in_backward():
            raise UnsupportedModel(
                f"gradient checkpointing recomputes part of a block, starting inside {type(self.module).__name__}, "
                f"but noise is injected from outside that part: checkpoint whole blocks instead"
            )
        owner, scope.owner = scope.owner, None
        try:
            return self.original(*args, **kwargs)
        finally:
            scope.owner = owner

    def _run_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
        """The module as one operator (its own target), around the functions it calls (the other targets)."""
        scope = self.scope
        self.calls += 1
        targets = self._targets_here(context)
        own = targets.get("residual") if self.block is not None else None
        if self.kind == MODULE and self.block is None:
            own = next(iter(targets.values()), None)
        own = own or targets.get(WHOLE)
        owner = scope.owner
        if self.kind != MODULE or WHOLE not in targets:  # functions called inside a plain module are its parent's
            scope.owner = None
        try:
            if own is None:
                return self._call(args, kwargs, targets, context)
            occurrence = context.occurrence(own)
            if isinstance(own, CallListener):

                def call(*args: Any, **kwargs: Any) -> Any:
                    return self._call(args, kwargs, targets, context)

                return own.run(self.module, call, args, kwargs, context=context, occurrence=occurrence)
            once = Once()
            args, kwargs = self._on_inputs(own, args, kwargs, context, occurrence, once)
            grad = torch.is_grad_enabled()
            if own.wants_weight or (grad and own.backward is not None):
                use = functools.partial(self._on_weight, own, context, occurrence, once)
                with WeightUse(self.module, use):
                    y = self._call(args, kwargs, targets, context)
            else:
                y = self._call(args, kwargs, targets, context)
            return own.on_output(y, context, occurrence, fresh=not grad and self.block is None)
        finally:
            scope.owner = owner

    def _targets_here(self, context: Context) -> dict[str, Target]:
        """The targets of the block we are in; a module shared by several blocks has some for each."""
        if self.shared:
            return self.targets.get(context.place, {})
        return next(iter(self.targets.values()), {})

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: dict[str, Target], context: Context) -> Any:
        """The original forward, with its function calls observed if requested."""
        if self.kind == MODULE:
            checkpointed = self.block is not None and _CHECKPOINT in self.module.__dict__
            return self._call_checkpointed(args, kwargs) if checkpointed else self.original(*args, **kwargs)
        scope = self.scope
        storage = None
        if self.kind == ATTENTION:
            x = first_tensor(args, kwargs)
            storage = x.dtype if isinstance(x, Tensor) and x.is_floating_point() else None
        calls = OperatorCalls(scope, self.kind, targets, context, module=self.module, storage=storage)
        scope.owner = calls
        with calls if scope.mode is None else contextlib.nullcontext():
            if isinstance(self.module, nn.MultiheadAttention):
                return multihead(self.module, *args, **kwargs)
            # Who watches whole calls as well looks at the model as it is: a user's own attention may be any formula.
            as_it_is = FUSED in targets and is_users_own(self.module)
            if self._routed is None or as_it_is or not (targets.keys() & {"matmul", "bmm", "softmax", *CACHED}):
                return self.original(*args, **kwargs)
            config = self.module.__dict__["config"]
            self.module.__dict__["config"] = self._routed
            try:
                return self.original(*args, **kwargs)
            finally:
                self.module.__dict__["config"] = config

    def _on_inputs(
        self,
        target: OperatorTarget,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Context,
        occurrence: int,
        once: Once,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first tensor argument, perturbed or tapped."""
        grad = target.backward is not None and torch.is_grad_enabled()
        if not target.wants_input and not grad:
            return args, kwargs
        x = first_tensor(args, kwargs)
        if not isinstance(x, Tensor) or not (x.is_floating_point() or target.wants_input):
            return args, kwargs
        new = target.on_input(x, context, occurrence)
        if grad:
            new = target.tap(new, context, occurrence, "input", once)
        return (args, kwargs) if new is x else with_tensor(args, kwargs, x, new)

    def _on_weight(
        self, target: OperatorTarget, context: Context, occurrence: int, once: Once, weight: Tensor
    ) -> Tensor:
        if keeps_weight_transposed(self.module):
            weight = target.on_weight(weight.transpose(0, 1), context, occurrence).transpose(0, 1)
        else:
            weight = target.on_weight(weight, context, occurrence)
        return target.tap(weight, context, occurrence, "weight", once) if torch.is_grad_enabled() else weight

    # -- recomputation

    def _call_checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """From version 5.23 on, transformers recomputes what the class's forward does, without calling us again."""
        held = self.module.__dict__
        checkpoint = held[_CHECKPOINT]
        held[_CHECKPOINT] = lambda forward, *inputs: checkpoint(functools.partial(self._part, forward), *inputs)
        try:
            return self.original(*args, **kwargs)
        finally:
            held[_CHECKPOINT] = checkpoint

    def _part(self, forward: functools.partial[Any], *args: Any) -> Any:
        """What a block's checkpoint runs: now, in the block's context, and again in backward, in that of its input."""
        scope = self.scope
        if self.retired or scope.context is not None or not in_backward():
            return forward(*args)
        scope.context = self._context(first_tensor(args, forward.keywords))
        try:
            return forward(*args)
        finally:
            scope.context = None

    def _remember(self, x: Any, context: Context) -> None:
        self._remembered.append((_identity(x), context.rows))

    def knows(self, x: Any) -> bool:
        """Whether this very tensor was the input of a forward."""
        identity = _identity(x)
        return identity is not None and any(identity == known for known, _ in list(self._remembered))

    def recall(self, x: Any, preferred: Rows | None) -> Rows | None:
        """The rows of the forward that had this exact tensor as input; it is alive as long as its graph.

        One tensor may have been the input of several forwards: then those recalled last (by a later block) are meant.
        A part of a block that starts at a module without a target is not known by its input: then the latest are.
        """
        same = [rows for identity, rows in list(self._remembered) if identity is not None and identity == _identity(x)]
        if any(rows is preferred for rows in same):
            return preferred
        if same:
            return same[-1]
        return preferred or (self._remembered[-1][1] if self._remembered else None)


def _identity(x: Any) -> tuple[Any, ...] | None:
    """What distinguishes a tensor from others alive: its address and shape (None: it has none, as under torch.func)."""
    try:
        return (x.data_ptr(), x.shape)
    except (AttributeError, RuntimeError):
        return None


def scopes_on(module: nn.Module) -> list[ModelScope]:
    """The scopes that are open on a module, the innermost first."""
    found, held = [], module.__dict__.get("forward")
    while isinstance(held, ForwardWrapper):
        if not held.retired:
            found.append(held.scope)
        held = held.replaced
    return found


def in_backward() -> bool:
    """Whether autograd runs in this thread now: only then is a forward a recomputation."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _uncompiled_run() -> Callable[..., Any]:
    """`ForwardWrapper._run_uncompiled`, which dynamo leaves alone with all that it calls."""
    return torch.compiler.disable(ForwardWrapper._run_uncompiled)  # type: ignore[no-untyped-call,no-any-return]
