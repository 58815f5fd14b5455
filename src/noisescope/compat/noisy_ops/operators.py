"""The seven operators by the original method notes' names, to call on tensors.

    from noisescope.noisy_ops import NoisyMatMul, enable_noisy_ops

    enable_noisy_ops(error_scale=0.05)
    y = NoisyMatMul.apply(a, b)  # or NoisyMatMul(a, b)

While noise is on they do what a module's own call would get: forward noise on the result, backward noise on the
gradient of each input, by the selections, scales and phases that are set, and counted. While it is off they are the
functions of torch. Inside a model that noise is on they have the layer of the block that calls them, and are noised
once: where the model's own calls are noised already, these only pass them on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.compat.noisy_ops.state import state


@dataclass(frozen=True)
class NoisyOperator:
    """A function of torch that is noised where the process-wide settings say so."""

    name: str
    operator: str
    function: Callable[..., Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = state.operator_call(self.name, self.operator, self.function, list(args), kwargs)
        return result

    def apply(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same call, as autograd functions spell it."""
        return self(*args, **kwargs)


def _softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(input, dim, dtype=dtype)


NoisyMatMul = NoisyOperator("NoisyMatMul", "matmul", torch.matmul)
NoisyBMM = NoisyOperator("NoisyBMM", "bmm", torch.bmm)
NoisyLinear = NoisyOperator("NoisyLinear", "linear", F.linear)
NoisySoftmax = NoisyOperator("NoisySoftmax", "softmax", _softmax)
NoisySiLU = NoisyOperator("NoisySiLU", "silu", F.silu)
NoisyGeLU = NoisyOperator("NoisyGeLU", "gelu", F.gelu)
NoisyLayerNorm = NoisyOperator("NoisyLayerNorm", "norm", F.layer_norm)
