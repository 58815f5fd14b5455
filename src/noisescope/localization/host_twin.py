"""The host twin: the model's own code, run on the host around the results that the device's operators gave.

Each module's code is run by itself. Calls of other modules, and of functions that were recorded, are not made: the
device's own results take their place. So whatever the code does between them (sums, products, rotations, masks, the
cache, copies) happens on the host, and what the host makes must be what the device's next call was given, and what the
module gave back, bit for bit. Errors do not accumulate, since every module starts from what the device gave it.

Code that calls other inexact functions (exp, a sum, a product that was not recorded) gets a tolerance: how far the
result moves when each of their results moves at random by two units of round-off (Monte Carlo arithmetic).

The code is the class's: forwards and hooks that were put on an instance are not run here, and a file of transformers is
read again from disk, so that functions replaced in memory do not take part either.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noisescope.localization.call_tree import Node, host_copy, is_state, leaves_in, mapped, tensors_in
from noisescope.localization.host_code import as_on_disk, is_exact
from noisescope.localization.roundoff_floors import Z_ELEMENT, number_format
from noisescope.localization.tensors import same_numbers
from noisescope.model.forwards import device_of

_RUNS = 8  # with random rounding
_ULPS = 4  # that functions of float32 differ by between libraries; in 16 bits they round alike, or to the next number
_UNITS = 2.0  # of round-off by which a result moves
_SEED = 11
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_OWN_FORWARDS = ("forward", "_hf_hook", "_old_forward")  # the last two are accelerate's

Key = tuple[int, str]  # a call inside a module (-1: the module's own output), and the path of a tensor in it


@dataclass(frozen=True)
class Difference:
    """A tensor on the device that is not what the host's code makes of the device's own results."""

    node: Node  # whose input or output it is
    tensor: str  # "input" or "output"
    path: str
    got: Tensor
    expected: Tensor
    limit: Tensor | None  # how far an element may be off; None: not at all
    inside: Node  # the module whose code was run
    before: Node | None  # the call before it there
    source: Node | None = None  # the call there that gave just what is expected


@dataclass
class Comparison:
    """What came of running one module's code."""

    compared: int = 0  # tensors
    exact: bool = True  # no inexact function had a part in it
    differences: list[Difference] = field(default_factory=list)
    problem: str = ""  # why the code could not be run to its end


class HostTwin:
    """The modules of a model, copied without their weights, whose calls are answered from a recorded tree."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = _copied_modules(model)
        for name, module in self._modules.items():
            vars(module)["forward"] = functools.partial(self._called, name, module)
        self._running: _Run | None = None
        self._exact: set[tuple[Any, ...]] = set()  # kinds of calls whose code had no inexact function
        self._visit: Callable[[Node], None] = lambda node: None
        kind = device_of(model).type
        self._cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def follow(self, nodes: list[Node], report: Callable[[Node, Comparison], None]) -> None:
        """Compares the modules among these calls of one forward, in the order in which their code runs.

        A module's code begins before that of the modules it calls, and goes on after them: a cache that both change
        must be changed in that order.
        """
        waiting = {id(node): node for node in nodes if node.is_module and not node.by_formula}

        def visit(node: Node) -> None:
            if waiting.pop(id(node), None) is not None:
                report(node, self.compare(node))

        self._visit = visit
        for node in sorted(nodes, key=lambda node: node.order):
            visit(node)
        self._visit = lambda node: None

    def read_directly(self) -> frozenset[str]:
        """Modules whose parameters the code of others read, as Mamba's does with its convolution."""
        return frozenset(name for name, module in self._modules.items() if module._parameters.was_read)  # type: ignore[attr-defined]

    def compare(self, node: Node) -> Comparison:
        """Runs the code of a module that was called, and compares."""
        twin = self._modules[node.module]
        result = Comparison()
        kind = (type(twin), node.phase, *((child.operator, child.by_formula) for child in node.children))
        before = self._kept(node, needed=kind not in self._exact)
        recorded = dict(_recorded(node))
        first = self._run(twin, node, (node.args, node.kwargs), recorded=recorded)
        result.compared, result.problem, result.exact = first.compared, first.problem, not first.was_inexact
        different = {key: (recorded[key], seen) for key, seen in first.seen.items() if key in recorded}
        limits: dict[Key, Tensor] = {}
        if not first.was_inexact and not first.problem:
            self._exact.add(kind)
        elif different and first.inexact and before is None:
            result.problem = "its code has inexact functions in some calls only"
            return result
        elif different and first.inexact:
            limits = self._limits(twin, node, before, different)
        for key, (got, expected) in different.items():
            limit = limits.get(key) if key in first.inexact else None
            if limit is None or _beyond(got, expected, limit):
                result.differences.append(_difference(node, key, got, expected, limit))
        return result

    def _kept(self, node: Node, *, needed: bool) -> Any:
        """The arguments as they are before the code changes them: a cache grows, and may be written in place.

        They are needed where the code has inexact functions. Where the same code had none in this phase, with the same
        calls recorded in it, no copy of a cache is made, which holds what all layers wrote.
        """
        given = (node.args, node.kwargs)
        if not any(map(is_state, leaves_in(given))):
            return given
        return host_copy(given) if needed else None

    def _limits(
        self, twin: nn.Module, node: Node, before: Any, different: dict[Key, tuple[Tensor, Tensor]]
    ) -> dict[Key, Tensor]:
        """7 standard deviations of the difference of two such runs, by element and by row, and some ulps."""
        runs = []
        for number in range(_RUNS):
            generator = torch.Generator("cpu").manual_seed(_SEED + number)
            runs.append(self._run(twin, node, host_copy(before), generator=generator).seen)
        limits = {}
        for key, (got, expected) in different.items():
            found = [run[key].double() for run in runs if key in run and run[key].shape == expected.shape]
            if len(found) < _RUNS:  # shapes depend on the numbers
                limits[key] = torch.full(got.shape, torch.inf, dtype=torch.float64)
                continue
            wide = torch.stack(found) - expected.double()
            if not got.is_floating_point():  # a choice, which round-off may turn where these runs turn it
                limits[key] = torch.where((wide != 0).any(0), torch.inf, 0.0).double()
                continue
            variance = torch.where(wide.isfinite(), wide, 0.0).square().mean(0)
            pooled = variance.mean(-1, keepdim=True) if variance.dim() else variance
            form = number_format(_narrow(got))
            ulp = form.ulp(torch.where(expected.isfinite(), expected, 0.0).double())
            limits[key] = Z_ELEMENT * (variance + pooled).sqrt() + (_ULPS if form.bits > 20 else 1) * ulp
        return limits

    def _run(
        self,
        twin: nn.Module,
        node: Node,
        state: Any,
        *,
        recorded: dict[Key, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> _Run:
        args, kwargs = mapped(state, Tensor.clone)
        run = _Run(node, recorded, generator)
        outer, self._running = self._running, run
        try:
            with (
                torch._C._EnableTorchFunction(),
                run,
                torch.autocast("cpu", self._cast, enabled=self._cast is not None),
            ):
                output = type(twin).forward(twin, *args, **kwargs)
                run.see(-1, output)
        except Exception as error:  # a stranger's code may raise anything: then the rest of it is not judged
            run.problem = f"its code can't be run on the host ({type(error).__name__}: {str(error)[:80]})"
        finally:
            self._running = outer
        return run

    def _called(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A module that the running code calls: the device's result, or, where there is none, that of its code."""
        run = self._running
        if run is None:
            return type(module).forward(module, *args, **kwargs)
        at = run.next_call(lambda child: child.is_module and child.module == name)
        if at is None:
            return type(module).forward(module, *args, **kwargs)
        run.see(at, (args, kwargs))
        if run.first:
            with torch._C.DisableTorchFunction():
                self._visit(run.node.children[at])
        return run.answer(at)


class _Run(TorchFunctionMode):
    """One run of a module's code: answers recorded functions, moves the results of inexact ones if asked to."""

    def __init__(self, node: Node, recorded: dict[Key, Tensor] | None, generator: torch.Generator | None) -> None:
        super().__init__()
        self.node, self.problem = node, ""
        self.compared = 0
        self.seen: dict[Key, Tensor] = {}  # but for what is as it was recorded
        self._recorded = recorded or {}
        self.inexact: set[Key] = set()  # what was seen after an inexact function had been called
        self._generator = generator
        self.first = generator is None
        self._taken: set[int] = set()
        self.was_inexact = False

    def next_call(self, fits: Callable[[Node], bool]) -> int | None:
        """The first recorded call that fits and was not answered yet."""
        for at, child in enumerate(self.node.children):
            if at not in self._taken and fits(child):
                self._taken.add(at)
                return at
        return None

    def see(self, at: int, value: Any) -> None:
        with torch._C.DisableTorchFunction():  # the comparison is no part of the code
            for path, tensor in tensors_in(value):
                self.compared += 1
                recorded = self._recorded.get((at, path))
                if recorded is not None and same_numbers(*_alike(recorded, tensor.detach())):
                    continue
                self.seen[at, path] = tensor.detach().clone()
                if self.was_inexact:
                    self.inexact.add((at, path))

    def answer(self, at: int) -> Any:
        return mapped(self.node.children[at].output, Tensor.clone)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            at = self.next_call(lambda child: child.by_formula and child.callee is func and _alike_call(child, args))
            if at is not None:
                self.see(at, (args, kwargs))
                return self.answer(at)
            result = func(*args, **kwargs)
            if is_exact(func, args):
                return result
            self.was_inexact = True
            return result if self._generator is None else mapped(result, self._moved)

    def _moved(self, y: Tensor) -> Tensor:
        """The tensor with each element moved by up to two units of round-off of its own, and of its row's rms."""
        if not y.is_floating_point() or not y.numel() or y.dtype.itemsize < 2:
            return y
        wide = y.double()
        finite = torch.where(wide.isfinite(), wide, 0.0)
        scale = finite.abs() + (finite.square().mean(-1, keepdim=True).sqrt() if y.dim() else 0.0) / 4
        steps = torch.rand(y.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return (wide + _UNITS * number_format(_narrow(y)).u * scale * steps).to(y.dtype)


def _alike_call(child: Node, args: tuple[Any, ...]) -> bool:
    """Whether a call of the same function has as many tensors, and the same words (an einsum's equation)."""
    words = [arg for arg in args if isinstance(arg, str)], [arg for arg in child.args if isinstance(arg, str)]
    return words[0] == words[1] and len(list(tensors_in(args))) == len(list(tensors_in(child.args)))


def _narrow(y: Tensor) -> torch.dtype:
    return y.dtype if y.is_floating_point() and y.dtype.itemsize > 1 else torch.float32


def _recorded(node: Node) -> Iterator[tuple[Key, Tensor]]:
    for at, child in enumerate(node.children):
        for path, tensor in tensors_in((child.args, child.kwargs)):
            yield (at, path), tensor
    for path, tensor in tensors_in(node.output):
        yield (-1, path), tensor


def _alike(got: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64 where their dtypes differ: a copy may have another one (autocast, outputs in float32)."""
    return (got, expected) if got.dtype == expected.dtype else (got.double(), expected.double())


def _beyond(got: Tensor, expected: Tensor, limit: Tensor) -> bool:
    if got.shape != expected.shape:
        return True
    error = (got.double() - expected.double()).abs()
    one_sided = (
        got.isnan() != expected.isnan() if got.is_floating_point() else torch.zeros_like(error, dtype=torch.bool)
    )
    return bool((error > limit).any()) or bool(one_sided.any())


def _difference(node: Node, key: Key, got: Tensor, expected: Tensor, limit: Tensor | None) -> Difference:
    at, path = key
    earlier = node.children if at < 0 else node.children[:at]
    source = next((child for child in reversed(earlier) if _gave(child, expected)), None)
    at_node, tensor = (node, "output") if at < 0 else (node.children[at], "input")
    return Difference(at_node, tensor, path, got, expected, limit, node, earlier[-1] if earlier else None, source)


def _gave(child: Node, expected: Tensor) -> bool:
    return any(x.shape == expected.shape and torch.equal(x, expected) for _, x in tensors_in(child.output))


# -- copies of modules


class HostParameters(dict[str, Any]):
    """Parameters by name, copied to the host when code asks for one; asked for all, it shows shapes and dtypes."""

    was_read = False

    def __getitem__(self, name: str) -> Any:
        self.was_read = True
        value = super().__getitem__(name)
        return value if value is None or value.device.type == "cpu" else nn.Parameter(value.detach().to("cpu"), False)

    def values(self) -> Any:
        return [None if value is None else _hollow(value) for value in super().values()]

    def items(self) -> Any:
        return list(zip(self, self.values(), strict=True))


def _hollow(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    return torch.empty((), dtype=value.dtype).expand(value.shape)


def _copied_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by name, without hooks and without forwards of its own, its buffers on the host."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo |= {id(p): p for p in module._parameters.values() if p is not None}
        memo |= {id(b): b.detach().to("cpu", copy=True) for b in module._buffers.values() if b is not None}
        attributes = vars(module)
        memo |= {id(attributes[name]): type(attributes[name])() for name in _HOOKS if name in attributes}
        memo |= {id(attributes[name]): None for name in _OWN_FORWARDS if name in attributes}
    twin = copy.deepcopy(model, memo)
    names = [name for name, _ in model.named_modules()]
    found = dict(twin.named_modules())
    for module in found.values():
        own: dict[str, Any] = module.__dict__
        own.pop("forward", None)
        own["_parameters"] = HostParameters(own["_parameters"])
        for name, value in own.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                own[name] = value.detach().to("cpu")
        module.__class__ = as_on_disk(type(module))
    return {name: found[name] for name in names}
