"""One call of an operator as a value: what was called, its arguments, its output, and how to repeat it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import call as call_plainly
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from noisescope.model.anatomy import MODULE, Unit, linear_weight
from noisescope.probe.functions import argument, first_tensor, is_turned, operands, with_tensor
from noisescope.probe.unfused_attention import AttentionArguments
from noisescope.sites import FUSED, Site

if TYPE_CHECKING:
    from noisescope.probe.operator_target import Context


@dataclass(frozen=True)
class RecordedCall:
    """A call of a module or function, as it was made. Tensors are not copied: what is changed in place changes here.

    `occurrence` counts the calls of this operator inside one call of its module (0 is q k^T, 1 is P v).
    `rerun(callee, *args, **kwargs)` calls a module or function as if for the first time in its forward: a fault that is
    simulated at the n-th call inside a module acts on the same calls again.
    """

    unit: Unit
    operator: str  # one of sites.OPERATORS, or FUSED for a fused attention call as a whole
    callee: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any  # as it was given back; None before the call was made
    occurrence: int
    context: Context
    rerun: Callable[..., Any] = call_plainly

    @property
    def site(self) -> Site:
        return self.unit.site(self.operator, occurrence=self.occurrence)

    @property
    def name(self) -> str:
        """Operator and callee for a message, such as "linear (Linear)"."""
        called = type(self.callee).__name__ if isinstance(self.callee, nn.Module) else self.callee.__name__
        return f"{self.operator} ({called})"

    @property
    def first_input(self) -> Tensor | None:
        """The first tensor argument."""
        return first_tensor(self.args, self.kwargs)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors it computes from, without the weight of a linear: both factors of a product, else one."""
        if isinstance(self.callee, nn.Module) or self.operator == FUSED:
            found: list[Any] = [self.first_input]
        else:
            positions, _ = operands(self.callee, self.operator, self.args, self.kwargs)
            found = [self.args[at] if isinstance(at, int) else self.kwargs[at] for at in positions]
        return tuple(value for value in found if isinstance(value, Tensor))

    @property
    def output_tensor(self) -> Tensor | None:
        """The returned tensor, or the first of several: a block's hidden states come first."""
        first = self.output[0] if isinstance(self.output, (tuple, list)) and self.output else self.output
        return first if isinstance(first, Tensor) else None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Input and output of a call that has both."""
        x, y = self.first_input, self.output_tensor
        assert x is not None and y is not None
        return x, y

    @property
    def weight(self) -> Tensor | None:
        """The weight that the call uses, detached; of a linear always [..., out, in], whichever way it is stored."""
        if isinstance(self.callee, nn.Module):
            return linear_weight(self.callee) if isinstance(getattr(self.callee, "weight", None), Tensor) else None
        at = operands(self.callee, self.operator, self.args, self.kwargs)[1]
        found = None if at is None else self.kwargs[at] if isinstance(at, str) else self.args[at]
        if not isinstance(found, Tensor):
            return None
        turned = is_turned(self.callee, self.args, weight=True)
        return found.detach().transpose(-1, -2) if turned else found.detach()

    @property
    def attention(self) -> AttentionArguments:
        """The arguments of a fused attention call."""
        return AttentionArguments.of(self.args, self.kwargs)

    @property
    def by_head(self) -> bool:
        """Whether tensors are [B, H, T, ...]: products and softmax inside attention."""
        return by_head(self.unit, self.operator)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        return argument(self.args, self.kwargs, position, *names, default=default)

    def repeat(self, *args: Any, **kwargs: Any) -> Any:
        """The module or function with other arguments."""
        return self.rerun(self.callee, *args, **kwargs)

    def again(self, x: Tensor, **changed: Any) -> Tensor:
        """The output of the same call for another first tensor."""
        args, kwargs = with_tensor(self.args, self.kwargs, self.first_input, x)
        y = self.repeat(*args, **(kwargs | changed))
        return y[0] if isinstance(y, (tuple, list)) else y  # type: ignore[no-any-return]


def by_head(unit: Unit, operator: str) -> bool:
    return unit.kind != MODULE and operator in ("matmul", "bmm", "softmax")
