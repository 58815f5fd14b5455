"""Which formula a module computes, asked of its class's code on the host with made-up numbers.

A model's own norm may be any of several formulas, and its name does not say which. Its class is run once here, with
random parameters on the host, and compared with each formula we know. The module under test is not called, its weights
are not used and nothing of its outputs is fitted, so a fault can't talk itself into being recognised as a formula.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
_SEED = 20  # of the made-up numbers; any will do
_AGREES = 1e-4  # relative: the formulas differ by much more, float32 by much less


@dataclass(frozen=True)
class NormFormula:
    """(x - mean) / sqrt(variance + eps) * gain + bias."""

    centred: bool  # LayerNorm takes the mean off, RMSNorm does not
    eps: float
    gain: str  # "weight", "one_plus_weight" or "none"
    bias: bool

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output in x's precision, and the normalised x before gain and bias."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        normal = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y = normal
        if weight is not None and self.gain != "none":
            y = y * (weight + 1 if self.gain == "one_plus_weight" else weight)
        return (y + bias if bias is not None and self.bias else y), normal


_norms: dict[tuple[Any, ...], NormFormula | None] = {}
_activations: dict[tuple[Any, ...], tuple[str, bool] | None] = {}


def norm_formula(module: nn.Module, width: int) -> NormFormula | None:
    """The formula of a norm module over its last dimension, or None."""
    found = (getattr(module, name, None) for name in _EPS_NAMES)
    eps = next((float(value) for value in found if isinstance(value, (int, float))), None)
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    known = (type(module), eps, shapes, width)
    if known not in _norms:
        _norms[known] = _find_norm(module, width, eps)
    return _norms[known]


def _find_norm(module: nn.Module, width: int, eps: float | None) -> NormFormula | None:
    generator = torch.Generator("cpu").manual_seed(_SEED)
    parameters = {
        name: torch.randn(p.shape, generator=generator, device="cpu") * 0.5 + 0.7
        for name, p in module._parameters.items()
        if p is not None
    }
    if any(p.shape != (width,) for p in parameters.values()) or not parameters.keys() <= {"weight", "bias"}:
        return None
    sizes = torch.tensor([[3.0], [1.0], [0.03], [1e-3]], device="cpu")  # small enough for eps to show
    x = (torch.randn(4, width, generator=generator, device="cpu") + 0.5) * sizes
    y = _run(module, parameters, x)
    if y is None:
        return None
    weight, bias = parameters.get("weight"), parameters.get("bias")
    gains = ("weight", "one_plus_weight") if weight is not None else ("none",)
    for centred in (False, True):
        for gain in gains:
            for size in (0.0, torch.finfo(torch.float32).eps) if eps is None else (eps,):
                formula = NormFormula(centred, size, gain, bias is not None)
                if _agree(y, formula.apply(x, weight, bias)[0]):
                    return formula
    return None


def gelu_inner(x: Tensor) -> Tensor:
    return (x + x.pow(3) * 0.044715) * math.sqrt(2 / math.pi)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * gelu_inner(x)),  # 0.5 x (1 + tanh t) without the cancellation
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_formula(module: nn.Module) -> tuple[str, bool] | None:
    """The name of an activation's formula, and whether its code rounds at every step (gelu_new is made of tanh)."""
    plain = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))))
    known = (type(module), plain, str(getattr(module, "act", "")).partition(" at ")[0])
    if known not in _activations:
        _activations[known] = _find_activation(module)
    return _activations[known]


def _find_activation(module: nn.Module) -> tuple[str, bool] | None:
    if any(p is not None for p in module._parameters.values()) or getattr(module, "inplace", False):
        return None
    x = torch.linspace(-6, 6, 2001, device="cpu")
    y = _run(module, {}, x)
    if y is None:
        return None
    for name, formula in ACTIVATIONS.items():
        if _agree(y, formula(x.double())):
            short = x.to(torch.bfloat16)
            rough = _run(module, {}, short)
            exact = formula(short.double())
            once = rough is not None and bool(((rough.double() - exact).abs() <= 0.005 * exact.abs() + 1e-6).all())
            return name, not once
    return None


def _run(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """What the class's forward gives for a bare copy with these parameters; None where it wants anything else."""
    bare = copy.copy(module)
    state = bare.__dict__
    state.pop("forward", None)  # a scope's wrapper, or accelerate's
    state["_parameters"] = dict(parameters) | {k: None for k, p in module._parameters.items() if p is None}
    state["_buffers"] = {k: None if b is None else b.detach().to("cpu") for k, b in module._buffers.items()}
    try:
        y = type(module).forward(bare, x)
    except Exception:  # whatever a stranger's code raises, it is not a formula we know
        return None
    return y.detach() if isinstance(y, Tensor) and y.shape == x.shape else None


def _agree(y: Tensor, expected: Tensor) -> bool:
    error = (y.double() - expected.double()).abs()
    return bool((error <= _AGREES * (expected.double().abs() + expected.double().abs().mean(-1, keepdim=True))).all())
