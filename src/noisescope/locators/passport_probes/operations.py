"""The operations under test: torch's own on a device, each replaceable by an emulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from noisescope.locators.passport_probes.numbers import Array, values

Operation = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Product:
    """One way to multiply x [M, K] by w [K, N] on a device, fed from the host."""

    call: Operation
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    out_dtype: torch.dtype | None = None  # None: the dtype of the operands

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    def place(self, x: Array) -> torch.Tensor:
        """Host numbers that the dtype holds exactly, on the device."""
        return torch.from_numpy(x).to(self.dtype).to(self.device)

    def raw(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.call(x.to(self.device), w.to(self.device)).cpu()

    def __call__(self, x: Array, w: Array) -> Array:
        return values(self.call(self.place(x), self.place(w)))


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] by w [K, N] as a model does it: the weight lies as [N, K]."""
    return F.linear(x, w.t().contiguous())


def scaled_product(x: torch.Tensor, w: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """An 8-bit product with scales of 1; w must lie column by column. Results in bfloat16."""
    one = torch.ones((), dtype=torch.float32, device=x.device)
    columns = w.t().contiguous().t()
    return torch._scaled_mm(x, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


@dataclass(frozen=True)
class Operations:
    """All that a passport calls. Replace single ones to emulate a device."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    products: Mapping[str, Operation] = field(default_factory=lambda: {"matmul": torch.matmul, "linear": linear})
    scaled: Mapping[str, Operation] = field(
        default_factory=lambda: {name: partial(scaled_product, fast=name == "fast") for name in ("exact", "fast")}
    )
    elementwise: Mapping[str, Operation] = field(
        default_factory=lambda: {
            "add": torch.add,
            "mul": torch.mul,
            "cast": cast,
            "maximum": torch.maximum,
            "minimum": torch.minimum,
            "relu": torch.relu,
            "exp": torch.exp,
        }
    )
    functions: Mapping[str, Operation] = field(
        default_factory=lambda: {
            "exp": torch.exp,
            "log": torch.log,
            "rsqrt": torch.rsqrt,
            "sqrt": torch.sqrt,
            "div": torch.div,
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
            "silu": F.silu,
            "gelu_erf": F.gelu,
            "gelu_tanh": partial(F.gelu, approximate="tanh"),
            "softmax": partial(torch.softmax, dim=-1),
            "sin": torch.sin,
            "cos": torch.cos,
        }
    )
    attention: Operation = F.scaled_dot_product_attention  # q, k, v [B, H, T, D]
