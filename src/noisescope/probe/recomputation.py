"""Gradients in bounded memory: a forward keeps each block's input, and backward computes the block again.

Between forward and backward a graph through many blocks holds every activation. Inside `recomputing`, it holds the
inputs of the blocks, and while backward passes a block, that block's activations. Scopes that were opened before see
the second forward as what it is (`Context.recomputing`): the same rows, so the same noise, and no tally.

What a gradient hook needs of a forward, it gets by `kept`: a closure would hold the tensor from the first forward on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from noisescope.model.anatomy import MODULE, Unit
from noisescope.probe.forward_patching import ModelScope
from noisescope.probe.operator_target import CallListener, Context


class Recomputing(ModelScope):
    """Open it after the scopes that inject or watch, so that these are inside of what is computed again.

    with inject(model, noise), Recomputing(model):
        model(tokens, use_cache=False).logits.sum().backward()  # a cache would be filled twice
    """

    def target_at(self, unit: Unit, operator: str) -> CallListener | None:
        if operator != "residual" or unit.kind != MODULE:
            return None
        return _Block(unit, operator, lambda call: None, rerun=self.rerun)


class _Block(CallListener):
    """Makes the call of a block twice: now, and once more in each backward."""

    def run(
        self,
        callee: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        context: Context,
        occurrence: int,
    ) -> Any:
        if not torch.is_grad_enabled() or context.recomputing:
            return call(*args, **kwargs)
        # Not stopped early: wrappers that load and release weights must see the end of the call.
        return checkpoint(call, *args, use_reentrant=False, early_stop=False, **kwargs)


class _Kept(torch.autograd.Function):
    """Saves tensors as autograd saves its own, so that a recomputation gives them back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("nothing depends on the anchor")


def kept(unit: Unit, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A function for backward that gives these tensors, detached. Call it in both forwards, and what it gives once.

    Inside a block they are computed again, outside they are held: no more than the model's last layers.
    """
    detached = tuple(tensor.detach() for tensor in tensors)
    if not isinstance(unit.place, int):
        return lambda: detached
    anchor = torch.empty(0, requires_grad=True)
    # Its output is held: a node that no tensor refers to any more frees what it saved, in older versions of torch.
    held: Any = _Kept.apply(anchor, *detached)  # type: ignore[no-untyped-call]
    return lambda: held.grad_fn.saved_tensors
