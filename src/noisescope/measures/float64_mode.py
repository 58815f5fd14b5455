"""Runs a float32 model's own code in float64: the reference that its round-off is measured against."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_ANGLES = (torch.cos, torch.sin, Tensor.cos, Tensor.sin)


class Float64Mode(TorchFunctionMode):
    """Every function receives float64 where the code has float32, so casts to float32 inside norms and softmaxes
    round nothing either.

    Cosines and sines stay in float32, with their angles: every engine computes those of rotary embeddings so, and they
    are no difference between two. The model is not changed: a weight is widened in the call that uses it, one at a
    time. Tensors of other dtypes stay as they are. A float32 tensor that the code writes into keeps its dtype.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.embedding:  # exact: only the rows that are looked up are widened
            return _widened(func(*args, **kwargs))
        if name in ("__get__", "__set__"):  # attributes
            return func(*args, **kwargs)
        if name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
            return func(args[0], *tree_map(_widened, args[1:]), **tree_map(_widened, kwargs))
        if func in _ANGLES:
            return _widened(func(args[0].to(torch.float32), *args[1:], **kwargs))
        args, kwargs = tree_map(_widened, (args, kwargs))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value
