"""Ways to make a model compute wrongly without noisescope: patched forwards, hooks, intercepted torch functions.

Every way is a context manager that restores what was there before, also after an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Damage = Callable[[Tensor], Tensor]
MakeDamage = Callable[[], Damage]  # fresh for each scope: some damages remember earlier calls
_MISSING = object()


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute in the owner's own __dict__, and puts back what was there."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def changed(value: Any, damage: Damage) -> Any:
    """The first floating-point tensor of an output damaged: of a tensor, a tuple, or a model output with logits."""
    if isinstance(value, Tensor):
        return on_device(damage, value)
    if isinstance(value, tuple):
        return (changed(value[0], damage), *value[1:])
    if hasattr(value, "logits"):
        value.logits = on_device(damage, value.logits)
    return value


def on_device(damage: Damage, value: Tensor) -> Tensor:
    """The damage as a device does it: no torch functions to be seen. float64 and integers are the host's."""
    if not value.is_floating_point() or value.dtype == torch.float64:
        return value
    with torch._C.DisableTorchFunction():
        return damage(value)


@contextlib.contextmanager
def forward_output(module: nn.Module, make: MakeDamage) -> Iterator[None]:
    """The module's own forward is replaced by one whose result is damaged."""
    own, damage = module.forward, make()
    with attribute(module, "forward", lambda *args, **kwargs: changed(own(*args, **kwargs), damage)):
        yield


@contextlib.contextmanager
def forward_arguments(module: nn.Module, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """The module's own forward gets other arguments."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return own(*args, **kwargs)

    with attribute(module, "forward", forward):
        yield


@contextlib.contextmanager
def forward_kernel(module: nn.Module, kernel: Callable[..., Tensor]) -> Iterator[None]:
    """The module's forward is another kernel, `kernel(module, *inputs)`: one call, whose steps no one can watch."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args[0].dtype == torch.float64:
            return own(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return kernel(module, *args, **kwargs)

    with attribute(module, "forward", forward):
        yield


@contextlib.contextmanager
def output_hook(module: nn.Module, make: MakeDamage) -> Iterator[None]:
    damage = make()
    handle = module.register_forward_hook(lambda _, args, output: changed(output, damage))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def input_hook(module: nn.Module, make: MakeDamage) -> Iterator[None]:
    """Damages the first tensor that enters, given by position or as `hidden_states`."""
    damage = make()

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (changed(args[0], damage), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": on_device(damage, kwargs["hidden_states"])}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class Region:
    """Whether one of some modules runs now; `entered` is called whenever one begins."""

    def __init__(self, entered: Callable[[], None] = lambda: None) -> None:
        self.depth = 0
        self._entered = entered

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            if self.depth == 1:
                self._entered()
            try:
                return own(*args, **kwargs)
            finally:
                self.depth -= 1

        with attribute(module, "forward", forward):
            yield


class Intercept(TorchFunctionMode):
    """Calls of some torch functions go to `instead(function, args, kwargs)`, inside `region` if there is one.

    The mode is entered with the scope, so whatever watches the model later sees the wrong result as the device's own.
    float64 is left alone: that is the arithmetic of the host, not of the device under test.
    """

    def __init__(
        self,
        functions: tuple[Callable[..., Any], ...],
        instead: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
        region: Region | None = None,
    ) -> None:
        super().__init__()
        self._functions, self._instead, self._region = functions, instead, region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mine = func in self._functions and (self._region is None or self._region.depth > 0)
        flat = [part for a in args for part in (a if isinstance(a, (list, tuple)) else (a,))]
        tensor = next((part for part in flat if isinstance(part, Tensor)), None)
        if not mine or tensor is None or tensor.dtype == torch.float64:
            return func(*args, **kwargs)
        return self._instead(func, args, kwargs)


@contextlib.contextmanager
def intercepted(
    modules: list[nn.Module],
    functions: tuple[Callable[..., Any], ...],
    instead: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Torch functions replaced while one of the modules runs; everywhere if there are none."""
    region = Region(getattr(instead, "restart", lambda: None))
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(region.of(module))
        stack.enter_context(Intercept(functions, instead, region if modules else None))
        yield


class FunctionOutput:
    """For `intercepted`: the function's own result, damaged; `nth` counts the calls that `only` accepts in a module."""

    def __init__(
        self, make: MakeDamage, only: Callable[[Tensor, tuple[Any, ...]], bool] | None = None, nth: int | None = None
    ) -> None:
        self._damage, self._only, self._nth = make(), only, nth
        self._calls = 0

    def restart(self) -> None:
        self._calls = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = func(*args, **kwargs)
        if not isinstance(y, Tensor) or not y.is_floating_point() or not (self._only is None or self._only(y, args)):
            return y
        self._calls += 1
        return self._damage(y) if self._nth in (None, self._calls - 1) else y


@contextlib.contextmanager
def both(*scopes: AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield
