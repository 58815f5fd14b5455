"""One forward and backward of the model under test: its calls, and the gradients that enter and leave each call.

Every tensor that a call receives or returns is replaced by an equal tensor with a hook: inputs by a view, outputs by a
copy, because callers may write to them. A recorded gradient therefore belongs to this one use of a tensor, and anything
that hooks or patched code do to it on the way shows as a difference between the two ends. Gradients are copied to the
host as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from noisescope.localization.call_tree import CallTree, Node
from noisescope.localization.host_copies import copied, mapped, tensors_in
from noisescope.model.host_copy import HostCopy, begin_copy
from noisescope.probe.recorded_call import RecordedCall

INPUT, OUTPUT = "input", "output"
GradientKey = tuple[int, str, str]  # order of the call, INPUT or OUTPUT, path of the tensor


class GradientCalls:
    """The calls of one forward and, after its backward, their gradients."""

    def __init__(self, tree: CallTree) -> None:
        self.tree = tree
        self._arrived: dict[GradientKey, HostCopy] = {}
        self._tapped: dict[GradientKey, str] = {}  # path at which the same tensor came first in this call

    def begin(self, call: RecordedCall) -> Any:
        self.tree.begin(call)
        return self._with_taps(self.tree.running, INPUT, (call.args, call.kwargs))

    def end(self, call: RecordedCall) -> Any:
        node = self.tree.running
        self.tree.end(call)
        return self._with_taps(node, OUTPUT, call.output)

    def tapped(self, node: Node, side: str) -> dict[str, Tensor]:
        """By path, the tensors of a call that may have a gradient, each once, on the host."""
        value = (node.args, node.kwargs) if side == INPUT else node.output
        return {path: x for path, x in tensors_in(value) if self._tapped.get((node.order, side, path)) == path}

    def first_path(self, node: Node, side: str, path: str) -> str | None:
        """Where the tensor at this path first occurs in the call; None if it has no gradient."""
        return self._tapped.get((node.order, side, path))

    def gradient(self, node: Node, side: str, path: str) -> Tensor | None:
        """The gradient that arrived there; None if none did."""
        found = self._arrived.get((node.order, side, path))
        return None if found is None else found.wait()

    def arrived(self, node: Node, side: str, path: str) -> Tensor:
        """The gradient there; zeros if none arrived, as in autograd."""
        found = self.gradient(node, side, path)
        return torch.zeros_like(self.tapped(node, side)[path]) if found is None else found

    def sole_gradient(self, node: Node, side: str) -> Tensor | None:
        """The gradient of the only tensor that a call takes or returns; None if it can have none."""
        tapped = self.tapped(node, side)
        return self.arrived(node, side, next(iter(tapped))) if len(tapped) == 1 else None

    def nbytes(self) -> int:
        calls = sum(x.nbytes for node in self.tree.nodes for _, x in tensors_in((node.args, node.output)))
        return calls + sum(found.wait().nbytes for found in self._arrived.values())

    def _with_taps(self, node: Node, side: str, value: Any) -> Any:
        paths = iter([path for path, _ in tensors_in(value)])
        first: dict[int, tuple[str, Tensor]] = {}

        def tap(x: Tensor) -> Tensor:
            path = next(paths)
            if not x.requires_grad or not x.is_floating_point() or type(x) not in (Tensor, nn.Parameter):
                return x
            if id(x) not in first:
                first[id(x)] = (path, self._tap(x, (node.order, side, path)))
            self._tapped[node.order, side, path], tapped = first[id(x)]
            return tapped

        return mapped(value, tap)

    def _tap(self, x: Tensor, key: GradientKey) -> Tensor:
        with torch._C.DisableTorchFunction():
            tapped = x.view_as(x) if key[1] == INPUT else x.clone()

            def keep(gradient: Tensor) -> None:
                self._arrived[key] = kept(gradient)

            tapped.register_hook(keep)  # type: ignore[no-untyped-call]
            return tapped


def kept(gradient: Tensor) -> HostCopy:
    """A gradient on its way to the host; it is copied because autograd may add to the same memory later."""
    dense = gradient.detach()
    dense = dense.to_dense() if dense.is_sparse else dense
    return begin_copy(dense) if dense.device.type == "cuda" else HostCopy(copied(dense))


class ParameterGradients:
    """The gradients that one backward sends to parameters, before they are added to `.grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._sent: dict[int, HostCopy] = {}
        self._handles = [
            p.register_hook(self._keep(id(p)))  # type: ignore[no-untyped-call]
            for p in parameters
        ]

    def _keep(self, key: int) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._sent[key] = kept(gradient)

        return keep

    def sent(self, parameter: nn.Parameter) -> Tensor | None:
        found = self._sent.get(id(parameter))
        return None if found is None else found.wait()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def differentiable(model: nn.Module, chosen: Callable[[nn.Parameter], bool]) -> Iterator[None]:
    """Compute gradients of the chosen parameters only, from zero; the caller's gradients are restored afterwards.

    Code that runs after accumulation (an optimiser step inside backward) would change the model, so it is disabled.
    """
    parameters = list(model.parameters())
    before = [(p, p.grad, p.requires_grad) for p in parameters]
    hooks = [(p._post_accumulate_grad_hooks, dict(p._post_accumulate_grad_hooks or {})) for p in parameters]
    try:
        for p, (own, _) in zip(parameters, hooks, strict=True):
            p.grad = None
            p.requires_grad_(chosen(p))
            if own:  # autograd holds this very mapping
                own.clear()
        with torch.enable_grad():
            yield
    finally:
        for p, gradient, required in before:
            p.requires_grad_(required)
            p.grad = gradient
        for own, kept_aside in hooks:
            if own is not None:
                own.update(kept_aside)


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Run checkpointed code once, as is: its recomputation in backward would not be the forward that was recorded."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            return function(*args)

    def once(*_: Any, **__: Any) -> Iterator[None]:
        yield

    names: dict[str, Any] = {"CheckpointFunction": Plain, "_checkpoint_without_reentrant_generator": once}
    own = {name: getattr(checkpoint, name) for name in names}
    for name, plain in names.items():
        setattr(checkpoint, name, plain)
    try:
        yield
    finally:
        for name, kept in own.items():
            setattr(checkpoint, name, kept)
