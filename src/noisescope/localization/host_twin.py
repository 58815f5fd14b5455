"""The host twin: runs the model's own code on the host around the results of the device's operators.

Each module's code runs by itself. Calls of other modules, and of recorded functions, are not made: the device's results
are used instead. Whatever the code does between them (sums, products, rotations, masks, the cache, copies) happens on
the host, and must match, bit for bit, what the device's next call received and what the module returned. Errors do not
accumulate, because every module starts from the device's values.

Code that calls other inexact functions (exp, a sum, an unrecorded product) gets a tolerance: how far the result moves
when each of their results moves randomly by two units of round-off (Monte Carlo arithmetic).

The code is the class's own: instance-level forwards and hooks are not run, and transformers files are loaded again from
disk, so functions patched in memory are not used either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noisescope.localization.call_tree import Node
from noisescope.localization.exact_functions import is_exact, is_random, rounds_once
from noisescope.localization.host_copies import (
    copied_modules,
    each_once,
    host_copy,
    is_state,
    leaves_in,
    mapped,
    own_state,
    plain_values,
    real_tensors_in,
    set_state,
    tensors_in,
)
from noisescope.localization.random_rounding import RandomRounding, Tolerance, limits_of, roundings
from noisescope.localization.roundoff_floors import convolution_bits, mean_bound
from noisescope.localization.shipped_functions import calls_replaced, without_modes
from noisescope.localization.tensors import same_numbers
from noisescope.localization.twin_comparison import (
    Comparison,
    Key,
    OtherArguments,
    OtherValue,
    alike,
    difference,
    is_shortened,
    other_dtype,
    other_forms,
    place_of,
    use_callers_arguments,
)
from noisescope.model.forwards import device_of
from noisescope.probe.unfused_attention import multihead
from noisescope.sites import FUSED


def autocast_of(model: nn.Module) -> torch.dtype | None:
    """The dtype that autocast gives the model's products here; ask before `host_arithmetic`, which turns it off."""
    kind = device_of(model).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class HostTwin:
    """The modules of a model, copied without weights, whose calls are answered from a recorded call tree."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        self._copied = dict(model.named_modules())
        self._modules = copied_modules(model)
        self._twins = {id(module): self._modules[name] for name, module in model.named_modules()}  # as arguments
        for name, module in self._modules.items():
            vars(module)["forward"] = functools.partial(self._called, name, module)
        self._running: _Run | None = None
        self._bounds: dict[tuple[Any, ...], float] = {}
        self._exact: set[tuple[Any, ...]] = set()  # kinds of calls whose code had no inexact function
        self._visit: Callable[[Node], None] = lambda node: None
        self._cast = autocast
        self._convolved = convolution_bits(device_of(model).type)
        self.fused = {name for name, module in model.named_modules() if calls_replaced(_forward_of(module))}

    def fits(self, model: nn.Module) -> bool:
        """Whether the model still has the modules that were copied: BigBird exchanges some in its first forward."""
        now = dict(model.named_modules())
        return now.keys() == self._copied.keys() and all(now[name] is module for name, module in self._copied.items())

    def follow(self, nodes: list[Node], report: Callable[[Node, Comparison], None]) -> None:
        """Compare the modules among these calls of one forward, in the order in which their code runs.

        A module's code starts before that of the modules it calls, and continues after them: a cache that both change
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
        """Modules whose parameters are read by other modules' code, as Mamba does with its convolution."""
        return frozenset(name for name, module in self._modules.items() if module._parameters.was_read)  # type: ignore[attr-defined]

    def compare(self, node: Node) -> Comparison:
        """Run the code of a called module, and compare."""
        twin = self._modules[node.module]
        result = Comparison()
        kind = (node.module, node.phase, *((child.operator, child.by_formula) for child in node.children))
        before, own = self._kept(node, needed=kind not in self._exact), own_state(twin)
        recorded = dict(_recorded(node))
        first = self._run(twin, node, (node.args, node.kwargs), recorded=recorded)
        result.compared, result.problem, result.exact = first.compared, first.problem, not first.was_inexact
        if first.is_random:
            return result
        different = {key: (recorded[key], seen) for key, seen in first.seen.items() if key in recorded}
        for at, words in other_forms(node, first.forms, first.asked, different).items():
            if at in first.asked:
                result.other_arguments.append(
                    OtherArguments(node.children[at], type(twin).__name__, *first.asked[at], words)
                )
                different = {key: value for key, value in different.items() if key[0] != at}
            else:
                result.others += [OtherValue(*place_of(node, at), one) for one in words]
        limits: dict[Key, Tolerance] = {}
        if not first.was_inexact and not first.problem:
            self._exact.add(kind)
        elif different and first.inexact and before is None:
            result.problem = "its code calls inexact functions in some calls only"
            return result
        elif different and first.inexact:
            after = own_state(twin)
            limits = self._limits(twin, node, (before, own), different)
            set_state(twin, after)
        result.equal = not different
        if not different and first.was_inexact and not first.problem:
            result.bound = self._usual_bound(twin, node, (before, own), recorded)
        for key, (got, expected) in different.items():
            limit = limits.get(key) if key in first.inexact else None
            gain, most = 0.0, math.inf
            if limit is not None and got.is_floating_point() and got.shape == expected.shape:
                result.bound = max(result.bound, mean_bound(limit.each, expected))
                gain, most = limit.gain_of(got, expected)
            each = None if limit is None else limit.each
            beyond = each is None or abs(gain) > most or _beyond(got, expected, each)
            if beyond and not same_numbers(*alike(got, expected)):
                result.differences.append(difference(node, key, got, expected, each, (gain, most)))
            elif is_shortened(node, got, expected):
                result.others.append(OtherValue(*place_of(node, key[0]), f"its {other_dtype(got, expected)}"))
        return result

    def rounded(self, node: Node, count: int) -> list[Tensor]:
        """What a module's code returns for a call in runs with random rounding; fewer if it can't run here."""
        twin, given = self._modules[node.module], (node.args, node.kwargs)
        found = [self._run(twin, node, host_copy(given), rounding=one) for one in roundings(count, self._convolved)]
        return [run.seen[-1, ""] for run in found if (-1, "") in run.seen]

    def _kept(self, node: Node, *, needed: bool) -> Any:
        """The arguments as they are before the code changes them: a cache grows, and may be written in place.

        They are needed where the code has inexact functions. Where the same code had none in this phase, with the same
        calls recorded in it, no copy of a cache is made, which holds what all layers wrote.
        """
        given = (node.args, node.kwargs)
        if not any(is_state(leaf) for _, leaf in leaves_in(given)):
            return given
        return host_copy(given) if needed else None

    def _usual_bound(self, twin: nn.Module, node: Node, before: tuple[Any, Any], recorded: dict[Key, Tensor]) -> float:
        """The tolerance of a class's outputs when it was not needed, from the first call in each dtype."""
        outputs = {key: (x, x) for key, x in recorded.items() if key[0] < 0 and x.is_floating_point() and x.numel()}
        kind = (type(twin), *{x.dtype for x, _ in outputs.values()})
        if kind not in self._bounds and before[0] is not None:
            after = own_state(twin)
            limits = self._limits(twin, node, before, outputs)
            set_state(twin, after)
            self._bounds[kind] = max((mean_bound(limits[key].each, x) for key, (x, _) in outputs.items()), default=0.0)
        return self._bounds.get(kind, 0.0)

    def _limits(
        self, twin: nn.Module, node: Node, before: tuple[Any, Any], different: dict[Key, tuple[Tensor, Tensor]]
    ) -> dict[Key, Tolerance]:
        runs = []
        for rounding in roundings(convolved=self._convolved):
            set_state(twin, before[1])
            runs.append(self._run(twin, node, host_copy(before[0]), rounding=rounding).seen)
        return limits_of(runs, different, autocast=self._cast_of(node) is not None)

    def _run(
        self,
        twin: nn.Module,
        node: Node,
        state: Any,
        *,
        recorded: dict[Key, Tensor] | None = None,
        rounding: RandomRounding | None = None,
    ) -> _Run:
        args, kwargs = mapped(state, each_once(Tensor.clone), lambda value: self._twins.get(id(value), value))
        run = _Run(node, recorded, rounding, fused=node.module in self.fused)
        outer, self._running = self._running, run
        try:
            cast = self._cast_of(node)
            with torch._C._EnableTorchFunction(), run, torch.autocast("cpu", cast, enabled=cast is not None):
                output = _code_of(twin)(twin, *args, **kwargs)
                run.see(-1, output, changed=_changed(node, (args, kwargs)))
        except Exception as error:  # third-party code may raise anything: then the rest of it is not judged
            run.problem = f"its code can't be run on the host ({type(error).__name__}: {str(error)[:80]})"
        finally:
            self._running = outer
        return run

    def _cast_of(self, node: Node) -> torch.dtype | None:
        """The dtype of autocast around a call, whether the caller or a module around it turned autocast on."""
        return node.cast or self._cast

    def _called(self, name: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """A module that the running code calls: the device's result or, if there is none, that of its code."""
        run = self._running
        if run is None:
            return _code_of(module)(module, *args, **kwargs)
        at = run.next_call(lambda child: child.module == name and _same_words(child, args, kwargs))
        if at is None:
            at = run.next_call(lambda child: child.is_module and child.module == name)
        if at is None:
            return _code_of(module)(module, *args, **kwargs)
        if run.first:
            with torch._C.DisableTorchFunction():
                use_callers_arguments(run.node.children[at], args, kwargs)
        run.see(at, (args, kwargs))
        if run.first:
            with torch._C.DisableTorchFunction():
                self._visit(run.node.children[at])
        with torch._C.DisableTorchFunction():
            return run.answer(at, (args, kwargs))


class _Run(TorchFunctionMode):
    """One run of a module's code: answers recorded functions, and perturbs the results of inexact ones if requested."""

    def __init__(
        self, node: Node, recorded: dict[Key, Tensor] | None, rounding: RandomRounding | None, *, fused: bool = False
    ) -> None:
        super().__init__()
        self.node, self.problem = node, ""
        self._fused = fused  # whether sums and products may lack a rounding of their own
        self.compared = 0
        self.seen: dict[Key, Tensor] = {}  # but for what is as it was recorded
        self._recorded = recorded or {}
        self.forms: dict[int, dict[str, Any]] = {}  # of each call, what it was given beside the numbers in tensors
        self.asked: dict[int, tuple[Any, Any]] = {}  # arguments of recorded functions
        self.inexact: set[Key] = set()  # what was seen after an inexact function had been called
        self._rounding = rounding
        self.first = rounding is None
        self._taken: set[int] = set()
        self.was_inexact = self.is_random = False

    def next_call(self, fits: Callable[[Node], bool]) -> int | None:
        """The first matching recorded call that was not answered yet."""
        for at, child in enumerate(self.node.children):
            if at not in self._taken and fits(child):
                self._taken.add(at)
                return at
        return None

    def see(self, at: int, value: Any, changed: Any = ()) -> None:
        with torch._C.DisableTorchFunction():  # the comparison is not part of the code
            if self.first:
                self.forms[at] = plain_values(value, words=at in self.asked)
            for path, tensor in (*real_tensors_in(value), *changed):
                self.compared += 1
                recorded = self._recorded.get((at, path))
                same = recorded is not None and same_numbers(*alike(recorded, tensor.detach()))
                if recorded is not None and same and not is_shortened(self.node, recorded, tensor):
                    continue
                self.seen[at, path] = tensor.detach().clone()
                if self.was_inexact:
                    self.inexact.add((at, path))

    def answer(self, at: int, given: Any) -> Any:
        """The result of the device's call; what it wrote to its arguments is written here as well."""
        child = self.node.children[at]
        here = dict(tensors_in(given))
        for path, value in child.changed.items():
            if path in here and here[path].shape == value.shape:
                here[path].copy_(value)
        passed = {id(x): here.get(child.passed.get(path, "")) for path, x in tensors_in(child.output)}

        def result(x: Tensor) -> Tensor:
            own = passed.get(id(x))  # an argument that is given back: who writes to one writes to both
            written = own is not None and own.shape == x.shape and 0 not in own.stride()  # expanded ones can't be
            return own.copy_(x) if own is not None and written else x.clone()

        return mapped(child.output, result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            at = self.next_call(lambda child: child.by_formula and child.callee is func and _alike_call(child, args))
            if at is not None:
                self.asked[at] = (args, kwargs)
                self.see(at, (args, kwargs))
                return self.answer(at, (args, kwargs))
            if any(kind not in (Tensor, nn.Parameter) for kind in types):  # a packed weight does it in its own way
                return self._of_subclass(func, args, kwargs)
            result = func(*args, **kwargs)
            if is_random(func):
                self.problem, self.is_random = "its code draws random numbers, and the host draws others", True
            exact = is_exact(func, args)
            once = exact and self._fused and rounds_once(func)
            if (exact and not once) or not _has_fractions((args, kwargs, result)):
                return result
            self.was_inexact = True
            if self._rounding is None:
                return result
            if self._rounding.shortens(func):
                args, kwargs = mapped((args, kwargs), self._rounding.cut)
                result = func(*args, **kwargs)
            return mapped(result, functools.partial(self._rounding.moved, once=once))

    def _of_subclass(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of a tensor subclass: it may round its inputs, so they are perturbed as well as its result."""
        exact = is_exact(func, args)
        if self._rounding is not None and not exact:
            args, kwargs = mapped((args, kwargs), self._rounding.moved)
        with without_modes():
            result = func(*args, **kwargs)
        self.was_inexact |= not exact
        return result if exact or self._rounding is None else mapped(result, self._rounding.moved)


def _has_fractions(value: Any) -> bool:
    return any(x.is_floating_point() or x.is_complex() for _, x in tensors_in(value))


def _changed(node: Node, given: Any) -> list[tuple[str, Tensor]]:
    """The arguments that the device's call wrote to, in the state the device left them."""
    here = dict(tensors_in(given))
    return [(f"changed.{path}", here[path]) for path in node.changed if path in here]


def _code_of(module: nn.Module) -> Callable[..., Any]:
    """The forward that the device ran; nn.MultiheadAttention, a single function, runs decomposed."""
    return multihead if isinstance(module, nn.MultiheadAttention) else type(module).forward


def _forward_of(module: nn.Module) -> Any:
    """The class's forward; None for a scripted module, whose class has none."""
    return getattr(type(module), "forward", None)


def _alike_call(child: Node, args: tuple[Any, ...]) -> bool:
    """Whether a call of the same function has tensors of the same shapes and the same strings (an einsum's equation).

    Fused attention may be given its keys once or repeated for each head, with the same result.
    """
    here, there = ([x.shape for _, x in tensors_in(each)] for each in (args, child.args))
    same = len(here) == len(there) if child.operator == FUSED else here == there
    return same and _words(args) == _words(child.args)


def _same_words(child: Node, args: Any, kwargs: Any) -> bool:
    """Compares strings such as layer types: code may iterate over a set of them in another order."""
    return child.is_module and _words((args, kwargs)) == _words((child.args, child.kwargs))


def _words(given: Any) -> list[str]:
    return [leaf for _, leaf in leaves_in(given) if isinstance(leaf, str)]


def _recorded(node: Node) -> Iterator[tuple[Key, Tensor]]:
    for at, child in enumerate(node.children):
        for path, tensor in real_tensors_in((child.args, child.kwargs)):
            yield (at, path), tensor
    for path, tensor in real_tensors_in(node.output):
        yield (-1, path), tensor
    for path, tensor in node.changed.items():
        yield (-1, f"changed.{path}"), tensor


def _beyond(got: Tensor, expected: Tensor, limit: Tensor) -> bool:
    if got.shape != expected.shape:
        return True
    one_sided = got.is_floating_point() and bool((got.isnan() != expected.isnan()).any())
    return one_sided or bool(((got.double() - expected.double()).abs() > limit).any())
