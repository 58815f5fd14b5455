"""Results, and what is passed between modules, of a shorter dtype than the code gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.formula_recognition import run_on_host
from noisescope.localization.host_copies import leaves_in, mapped
from noisescope.localization.roundoff_floors import number_format


def is_shorter(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype's numbers have fewer bits than those of another."""
    if not (one.is_floating_point and other.is_floating_point) or one == other:
        return False
    return torch.finfo(one).eps > torch.finfo(other).eps


def as_coded(callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
    """A call's output in the dtype that its own code gives it on the host, if the device gave a shorter one.

    Its numbers are then judged by what that dtype can hold. Not for calls under autocast, which shortens results.
    """
    own = callee.parameters(recurse=False) if isinstance(callee, nn.Module) else ()
    given = [leaf for _, leaf in leaves_in((args, kwargs))]
    dtypes = [x.dtype for x in (*own, *given) if isinstance(x, Tensor)] + [
        leaf for leaf in given if isinstance(leaf, torch.dtype)
    ]
    if not any(is_shorter(y.dtype, dtype) for dtype in dtypes):
        return y
    expected = _result_on_host(callee, args, kwargs)
    longer = isinstance(expected, Tensor) and is_shorter(y.dtype, expected.dtype)
    return y.to(expected.dtype) if longer and number_format(expected.dtype) != number_format(y.dtype) else y


def _result_on_host(callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(callee, nn.Module):
        return run_on_host(callee, args, kwargs)
    try:
        return callee(*mapped(args, Tensor.clone), **mapped(kwargs, Tensor.clone))
    except Exception:  # these arguments are not for the host's kernel
        return None
