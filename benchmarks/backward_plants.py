"""Faults in gradients for backward_faults.py: each changes a fresh model, and leaves its forward as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Plant = Callable[[Any, contextlib.ExitStack], None]


@dataclass(frozen=True)
class GradientFault:
    """One fault; `modules` may be named for it, and `tensor` says whose gradient is wrong ("" for any)."""

    name: str
    model: str
    dtype: str
    modules: tuple[str, ...]
    tensor: tuple[str, ...]
    plant: Plant
    held_out: bool = False


# -- functions with a gradient of one's own


def with_gradient(forward: Callable[..., Tensor], backward: Callable[..., tuple[Any, ...]]) -> Callable[..., Tensor]:
    """A function whose backward(gradient, *tensors) is given; None for a tensor's gradient means none."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(*tensors)
            with torch.no_grad():
                return forward(*tensors)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
            return backward(g, *ctx.saved_tensors)

    return Own.apply  # type: ignore[no-any-return,no-untyped-call]


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def linear(name: str, change: Callable[..., tuple[Any, Any]]) -> Plant:
    """change(g, x, w) -> (dx, dw) of rows g [R, N], x [R, K], w [N, K]; the bias has its right gradient."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        module = model.get_submodule(name)

        def back(g: Tensor, x: Tensor, w: Tensor, *bias: Tensor) -> tuple[Any, ...]:
            dx, dw = change(flat(g), flat(x), w)
            return (dx.reshape(x.shape).to(x.dtype), dw.to(w.dtype), *(flat(g).sum(0) for _ in bias))

        own = with_gradient(lambda x, w, *bias: F.linear(x, w, *bias), back)
        bias = () if module.bias is None else (module.bias,)
        module.forward = lambda x: own(x, module.weight, *bias)

    return plant


def dx(g: Tensor, w: Tensor) -> Tensor:
    return g @ w


def dw(g: Tensor, x: Tensor) -> Tensor:
    return g.T @ x


def in_bfloat16(a: Tensor, b: Tensor, step: int = 4) -> Tensor:
    """a b with the sum kept in bfloat16."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for start in range(0, a.shape[1], step):
        part = a[:, start : start + step].float() @ b[start : start + step].float()
        total = (total.float() + part).to(torch.bfloat16)
    return total.to(a.dtype)


def shortened(x: Tensor, bits: int) -> Tensor:
    """The upper bits of float32's mantissa."""
    mask = -(1 << (23 - bits))
    return (x.float().view(torch.int32) & mask).view(torch.float32).to(x.dtype)


class Remembering:
    """Gives what it was given the call before."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x.clone()
        return x if last is None else last


def without_tail(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return dx(g, w), dw(g[:-1], x[:-1])


def dead_lane(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 5::16] = 0
    return x


# -- norms


def layer_norm_without_mean(name: str) -> Plant:
    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        module = model.get_submodule(name)

        def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.layer_norm(x, w.shape, w, b, module.eps)

        def back(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Any, ...]:
            centred = x - x.mean(-1, keepdim=True)
            root = (centred.square().mean(-1, keepdim=True) + module.eps).rsqrt()
            n, scaled = centred * root, g * w
            return root * (scaled - n * (scaled * n).mean(-1, keepdim=True)), flat(g * n).sum(0), flat(g).sum(0)

        own = with_gradient(forward, back)
        module.forward = lambda x: own(x, module.weight, module.bias)

    return plant


def rms_norm(name: str, change: Callable[..., tuple[Tensor, Tensor]]) -> Plant:
    """change(dx, dw, the term of dx that projects, rows of g n) -> (dx, dw)"""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        module = model.get_submodule(name)
        eps = module.variance_epsilon

        def forward(x: Tensor, w: Tensor) -> Tensor:
            wide = x.float()
            return w * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

        def back(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            root = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
            n, scaled = x.float() * root, (g * w).float()
            projected = root * n * (scaled * n).mean(-1, keepdim=True)
            found = change(root * scaled - projected, flat(g.float() * n).sum(0), projected, flat(g.float() * n))
            return found[0].to(x.dtype), found[1].to(w.dtype)

        own = with_gradient(forward, back)
        module.forward = lambda x: own(x, module.weight)

    return plant


# -- functions inside attention


class InsteadOf(TorchFunctionMode):
    """Another function in place of one, in the calls that one module makes."""

    def __init__(self, model: Any, name: str, function: Any, other: Callable[..., Any], call: int = 0) -> None:
        super().__init__()
        self.active, self.calls, self.call = False, 0, call
        self.function, self.other = function, other
        module = model.get_submodule(name)
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end)

    def begin(self, *_: Any) -> None:
        self.active, self.calls = True, 0

    def end(self, *_: Any) -> None:
        self.active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and func in self.function:
            self.calls += 1
            if self.calls == self.call + 1:
                self.active = False
                try:
                    return self.other(*args, **(kwargs or {}))
                finally:
                    self.active = True
        return func(*args, **(kwargs or {}))


def attention(name: str, change: Callable[..., tuple[Any, Any, Any]]) -> Plant:
    """change(dq, dk, dv) of scaled_dot_product_attention -> the same."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        def other(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            def back(g: Tensor, *given: Tensor) -> tuple[Any, ...]:
                leaves = [t.detach().requires_grad_() for t in given]
                with torch.enable_grad():
                    y = F.scaled_dot_product_attention(*leaves, **options)
                return change(*torch.autograd.grad(y, leaves, g))

            def forward(*given: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(*given, **options)

            return with_gradient(forward, back)(q, k, v)

        stack.enter_context(InsteadOf(model, name, (F.scaled_dot_product_attention,), other))

    return plant


def softmax(name: str) -> Plant:
    """Its backward without the sum over the row."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        def other(x: Tensor, dim: int = -1, dtype: Any = None, **_: Any) -> Tensor:
            own = with_gradient(
                lambda t: torch.softmax(t, dim, dtype), lambda g, t: (g * torch.softmax(t, dim, dtype),)
            )
            return own(x)

        stack.enter_context(InsteadOf(model, name, (F.softmax, torch.softmax), other))

    return plant


def product(name: str, call: int, change: Callable[..., tuple[Any, Any]]) -> Plant:
    """change(g, a, b) of the n-th product inside attention."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        other = with_gradient(torch.matmul, change)
        stack.enter_context(InsteadOf(model, name, (torch.matmul, Tensor.matmul, Tensor.__matmul__), other, call))

    return plant


# -- embeddings, activations, hooks, sums


def embedding(name: str, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Plant:
    """change(g [R, C], ids [R], table) -> the gradient of the table."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        module = model.get_submodule(name)

        def forward(ids: Tensor) -> Tensor:
            own = with_gradient(lambda w: F.embedding(ids, w), lambda g, w: (change(flat(g), ids.flatten(), w),))
            return own(module.weight)

        module.forward = forward

    return plant


def last_wins(g: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    found = torch.zeros_like(table)
    for row, at in zip(g, ids.tolist(), strict=True):
        found[at] = row
    return found


def by_frequency(g: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    counts = torch.bincount(ids, minlength=len(table)).clamp_min(1)
    return torch.zeros_like(table).index_add(0, ids, g) / counts[:, None].to(g.dtype)


def one_row_further(g: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    return torch.zeros_like(table).index_add(0, (ids + 1) % len(table), g)


def activation(name: str, slope: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        module = model.get_submodule(name)
        code = type(module).forward
        module.forward = with_gradient(lambda x: code(module, x), lambda g, x: (g * slope(x),))

    return plant


def backward_hook(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        module = model.get_submodule(name)
        module.register_full_backward_hook(lambda _, given, __: tuple(None if g is None else change(g) for g in given))

    return plant


def backward_pre_hook(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        model.get_submodule(name).register_full_backward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))

    return plant


def tensor_hook(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        def listen(_: Any, __: Any, y: Any) -> None:
            first = y if isinstance(y, Tensor) else y[0]
            if first.requires_grad:
                first.register_hook(change)

        model.get_submodule(name).register_forward_hook(listen)

    return plant


def parameter_hook(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda model, stack: model.get_parameter(name).register_hook(change) and None


def late_parameter_hook(module: str, name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """Registered in each forward, so that it comes after whatever listens to the parameter."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        held: list[Any] = []

        def listen(*_: Any) -> None:
            for handle in held:
                handle.remove()
            p = model.get_parameter(name)
            held[:] = [p.register_hook(change)] if p.requires_grad else []

        model.get_submodule(module).register_forward_pre_hook(listen)

    return plant


class EverySecond:
    """Nothing of every second gradient arrives."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, g: Tensor) -> Tensor:
        self.count += 1
        return torch.zeros_like(g) if self.count % 2 == 0 else g


def patched(module: str, name: str, make: Callable[[Any], Any]) -> Plant:
    """A function of a file of transformers, replaced in memory."""

    def plant(model: Any, stack: contextlib.ExitStack) -> None:
        import importlib
        from unittest import mock

        home = importlib.import_module(module)
        stack.enter_context(mock.patch.object(home, name, make(getattr(home, name))))

    return plant


def dead_zone(g: Tensor) -> Tensor:
    return torch.where(g.abs() < 0.3 * g.float().std(), 0.0, g)


def with_spike(g: Tensor) -> Tensor:
    g = g.clone()
    g.view(-1)[g.numel() // 3] += 10 * g.abs().max()
    return g
