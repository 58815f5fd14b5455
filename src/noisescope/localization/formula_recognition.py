"""Recognises which formula a module computes by running its class's code on the host with synthetic inputs.

A model's own norm may be any of several formulas, and its name does not say which; a subclass of nn.Linear may add a
low-rank product, round its input, or normalise its weight. The class is run once here, with random parameters on the
host, and compared with each formula we know. The module under test is not called, its weights are not used and nothing
of its outputs is fitted, so a fault can't talk itself into being recognised as a formula.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.localization.host_copies import give_code_from_disk
from noisescope.localization.shipped_functions import shipped_functions

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-7, 1e-3, 1e-4, 0.0, torch.finfo(torch.float32).eps)  # written in the code
_SEED = 20  # of the synthetic numbers; any works
_AGREES = 1e-4  # relative: the formulas differ by much more, float32 by much less
_ROUNDINGS = 16  # units of round-off by which 16-bit code may be off
_ROWS = 6
_ROUGH_ROWS, _ROUGH = 256, 2.5  # standard errors of a row's factor: 1 to 2 where each element is rounded by itself
_MOST_WEIGHTS = 1 << 22  # synthetic numbers of a linear: a head with more outputs is tried with fewer of them
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What torch, accelerate and our own scopes keep in a module, none of which its class's forward reads.
_KEPT_FOR_OTHERS = {"forward", "_old_forward", "_hf_hook", "_is_hf_initialized", "_non_persistent_buffers_set"}

_known: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def remembered(kind: str, module: nn.Module, extra: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """`find()`, cached for all modules of one class with the same attributes."""
    attributes = list(_attributes(module))
    key = (kind, *extra, *(part for name, value in attributes for part in (name, _plain(value))))
    if key not in _known:
        _known[key] = (find(), attributes)  # kept, so that no id in the key is given to another object
    return _known[key][0]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a class's forward may depend on: attributes, and the shapes of parameters and buffers, with children."""
    yield "class", type(module)
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield name, tuple((key, None if t is None else (tuple(t.shape), t.dtype)) for key, t in value.items())
            if name == "_buffers":  # a scale is one
                yield "numbers", tuple(t.item() for t in value.values() if t is not None and t.numel() == 1)
        elif name == "_modules":
            for child in value.values():
                yield from () if child is None else _attributes(child)
        elif name not in _KEPT_FOR_OTHERS and "_hooks" not in name:
            yield name, value


def _plain(value: Any) -> Any:
    """A plain value itself, otherwise its identity."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each) for each in value)
    if isinstance(value, (bool, int, float, str, type, torch.dtype, torch.device)) or value is None:
        return (type(value), value)
    if callable(value):  # functions of one name do one thing, and a bound one is another object each time
        return str(value).partition(" at ")[0]
    return id(value)


# -- linears


@dataclass(frozen=True)
class LinearFormula:
    """x W^T + b; where `transposed`, x W + b."""

    transposed: bool
    bias: bool


def linear_formula(module: nn.Module) -> LinearFormula | None:
    """How a linear module multiplies its input by `weight` and adds `bias`; None if it does something else."""
    if type(module).forward is nn.Linear.forward:
        return LinearFormula(transposed=False, bias=module.bias is not None)
    found: LinearFormula | None = remembered("linear", module, (), lambda: _find_linear(module))
    return found


def _find_linear(module: nn.Module) -> LinearFormula | None:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    if weight.numel() > _MOST_WEIGHTS:
        fewer = _fewer_outputs(module, max(8, _MOST_WEIGHTS // max(weight.shape)))
        return None if fewer is None else _find_linear(fewer)
    found = None
    own = (weight.dtype,) if weight.dtype in (torch.bfloat16, torch.float16) else ()
    for dtype in (torch.float32, *own):  # code may do something else with sixteen bits
        parameters = _made_up_parameters(module, dtype)
        found = _linear_of(module, parameters)
        if found is None:
            return None
    return found


def _linear_of(module: nn.Module, parameters: dict[str, Tensor]) -> LinearFormula | None:
    w, b = parameters["weight"], parameters.get("bias")
    within = max(_AGREES, _ROUNDINGS * torch.finfo(w.dtype).eps if w.dtype.itemsize < 4 else 0.0)
    for transposed in (False, True):
        matrix = w.T if transposed else w
        x = _made_up_rows(matrix.shape[-1]).to(w.dtype)
        y = _run(module, parameters, x)
        if y is None or y.shape != (_ROWS, matrix.shape[0]):
            continue
        for bias in (True, False) if b is not None else (False,):
            added = b.double() if b is not None and bias else None
            if _agree(y, F.linear(x.double(), matrix.double(), added), within):
                return LinearFormula(transposed, bias)
    return None


def _fewer_outputs(module: nn.Module, count: int) -> nn.Module | None:
    """A linear of the same class with only its first outputs; None if the output dimension is unknown."""
    bare = copy.copy(module)
    for name in ("out_features", "nf"):
        outputs = vars(module).get(name)
        if isinstance(outputs, int) and outputs > count:
            bare.__dict__[name] = count
            shapes = {key: p for key, p in module._parameters.items() if p is not None}
            bare.__dict__["_parameters"] = {
                key: p.detach()[tuple(slice(count) if n == outputs else slice(None) for n in p.shape)]
                for key, p in shapes.items()
            }
            return bare if bare._parameters["weight"].numel() <= _MOST_WEIGHTS else None  # type: ignore[union-attr]
    return None


# -- calls on the host


def run_on_host(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: dict[str, Tensor] | None = None
) -> Any:
    """What the class's forward returns on the host, with other parameters or copies of its own."""
    return _call(module, parameters, None, *copied_to_host(args), **copied_to_host(kwargs))


def copied_to_host(value: Any) -> Any:
    """A tensor, or a container of tensors, on the host; a cache or a config stays as it is."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) in (tuple, list):
        return type(value)(copied_to_host(each) for each in value)
    return {key: copied_to_host(each) for key, each in value.items()} if type(value) is dict else value


# -- norms


@dataclass(frozen=True)
class NormFormula:
    """(x - mean) / sqrt(variance + eps) * gain + bias."""

    centred: bool  # LayerNorm takes the mean off, RMSNorm does not
    eps: float
    gain: str  # "weight", "one_plus_weight" or "none"
    bias: bool
    weight_name: str = "weight"  # of the parameters
    bias_name: str = "bias"
    gain_dtype: torch.dtype | None = None  # that the code rounds 1 + weight to

    def gain_of(self, weight: Tensor) -> Tensor:
        """What each channel is multiplied by, in the weight's precision."""
        if self.gain != "one_plus_weight":
            return weight
        return weight + 1 if self.gain_dtype is None else (weight + 1).to(self.gain_dtype).to(weight.dtype)

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output in x's precision, and the normalised x before gain and bias."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        normal = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y = normal
        if weight is not None and self.gain != "none":
            y = y * self.gain_of(weight)
        return (y + bias if bias is not None and self.bias else y), normal

    def parameters_of(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of a module with this formula."""
        own = module._parameters
        return own.get(self.weight_name) if self.gain != "none" else None, own.get(
            self.bias_name
        ) if self.bias else None


def norm_formula(module: nn.Module, width: int) -> NormFormula | None:
    """The formula of a norm module over its last dimension, or None."""
    key = (width, _possible_eps(module))
    found: NormFormula | None = remembered("norm", module, key, lambda: _find_norm(module, width))
    return found


def norm_rounds_at_every_step(module: nn.Module, width: int, dtype: torch.dtype) -> bool:
    """Whether a norm's own code computes in 16 bits, so that a whole row may be scaled by one factor."""
    formula = norm_formula(module, width)
    if formula is None or dtype.itemsize != 2:
        return False
    return bool(remembered("16 bits", module, (width, dtype), lambda: _is_rough(module, formula, width, dtype)))


def _is_rough(module: nn.Module, formula: NormFormula, width: int, dtype: torch.dtype) -> bool:
    """By the factors of synthetic rows, against what the errors of single elements leave in them."""
    found = _made_up_error(module, formula, width, dtype)
    if found is None:
        return False
    error, along = found
    size = along.square().sum(-1, keepdim=True)
    factor = (error * along).sum(-1, keepdim=True) / size
    alone = ((error - factor * along) * along).square().sum(-1) / size[:, 0].square()
    return float(factor.square().mean()) > _ROUGH**2 * float(alone.mean())


def _made_up_error(
    module: nn.Module, formula: NormFormula, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """How far a norm's own code is from its formula on synthetic rows, and the formula's result without the bias."""
    parameters = _made_up_parameters(module, dtype)
    x = torch.randn(_ROUGH_ROWS, width, generator=torch.Generator("cpu").manual_seed(_SEED), device="cpu").to(dtype)
    y = _run(module, parameters, x)
    if y is None or y.shape != x.shape:
        return None
    wide = {name: p.double() for name, p in parameters.items()}
    weight, bias = wide.get(formula.weight_name), wide.get(formula.bias_name)
    exact, along = (formula.apply(x.double(), weight, added)[0] for added in (bias, None))
    return y.double() - exact, along


def _possible_eps(module: nn.Module) -> tuple[float, ...]:
    """The attribute named eps; otherwise small numbers among the attributes and constants of the code."""
    named = (getattr(module, name, None) for name in _EPS_NAMES)
    own = next((float(value) for value in named if isinstance(value, (int, float))), None)
    if own is not None:
        return (own,)
    return (*(v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1), *_USUAL_EPS)


def _find_norm(module: nn.Module, width: int) -> NormFormula | None:
    parameters = _made_up_parameters(module, torch.float32)
    if len(parameters) > 2 or any(p.shape != (width,) for p in parameters.values()):
        return None
    x = _made_up_rows(width)
    y = _run(module, parameters, x)
    if y is None or y.shape != x.shape:
        return None
    for weight, bias in _assignments(parameters):
        gains = ("none",) if weight is None else ("weight", "one_plus_weight")
        for centred in (False, True):
            for gain in gains:
                for eps in _possible_eps(module):
                    formula = NormFormula(centred, eps, gain, bias is not None, weight or "weight", bias or "bias")
                    own = formula.apply(x.double(), *(parameters.get(name or "") for name in (weight, bias)))[0]
                    if _agree(y, own, _AGREES):
                        return _with_rounded_gain(module, formula, width)
    return None


def _with_rounded_gain(module: nn.Module, formula: NormFormula, width: int) -> NormFormula:
    """The formula, with 1 + weight rounded to the weight's dtype where the module's own code does that."""
    weight = module._parameters.get(formula.weight_name)
    if weight is None or formula.gain != "one_plus_weight" or weight.dtype.itemsize != 2:
        return formula
    rounded = dataclasses.replace(formula, gain_dtype=weight.dtype)
    found = [_made_up_error(module, each, width, weight.dtype) for each in (formula, rounded)]
    off = [math.inf if each is None else float(each[0].square().mean()) for each in found]
    return rounded if off[1] < off[0] else formula


def _assignments(parameters: dict[str, Tensor]) -> list[tuple[str | None, str | None]]:
    """Which parameter may be the gain and which the bias; None for neither."""
    names = list(parameters)
    if len(names) == 2:
        return [(names[0], names[1]), (names[1], names[0])]
    return [(names[0], None), (None, names[0])] if names else [(None, None)]


# -- activations


def gelu_inner(x: Tensor) -> Tensor:
    return (x + x.pow(3) * 0.044715) * math.sqrt(2 / math.pi)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * gelu_inner(x)),  # 0.5 x (1 + tanh t) without the cancellation
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_formula(module: nn.Module) -> tuple[str, bool] | None:
    """The name of an activation's formula, and whether its code rounds at every step (gelu_new uses tanh)."""
    found: tuple[str, bool] | None = remembered("activation", module, (), lambda: _find_activation(module))
    return found


def _find_activation(module: nn.Module) -> tuple[str, bool] | None:
    if any(p is not None for p in module._parameters.values()) or getattr(module, "inplace", False):
        return None
    x = torch.linspace(-6, 6, 2001, device="cpu", dtype=torch.float64)  # wrong kernels are mostly of shorter ones
    y = _run(module, {}, x)
    if y is None or y.shape != x.shape:
        return None
    for name, formula in ACTIVATIONS.items():
        if _agree(y, formula(x), _AGREES):
            short = x.to(torch.bfloat16)
            rough = _run(module, {}, short)
            exact = formula(short.double())
            once = rough is not None and bool(((rough.double() - exact).abs() <= 0.005 * exact.abs() + 1e-6).all())
            return name, not once
    return None


# -- running a class on synthetic numbers


def _made_up_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(_SEED)
    return {
        name: (torch.randn(p.shape, generator=generator, device="cpu") * 0.5 + 0.7).to(dtype)
        for name, p in module._parameters.items()
        if p is not None
    }


def _made_up_rows(width: int) -> Tensor:
    """Synthetic rows of several sizes: large enough to reach a clip, small enough to show an eps."""
    generator = torch.Generator("cpu").manual_seed(_SEED + 1)
    sizes = torch.tensor([[30.0], [3.0], [1.0], [0.03], [1e-3], [1e-5]], device="cpu")
    return (torch.randn(_ROWS, width, generator=generator, device="cpu") + 0.5) * sizes


def _own_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu() for name, p in module._parameters.items() if p is not None}


def _run(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    y = _call(module, parameters, x.dtype, x)
    return y if isinstance(y, Tensor) else None


def _call(
    module: nn.Module, parameters: dict[str, Tensor] | None, made_up: torch.dtype | None, *args: Any, **kwargs: Any
) -> Any:
    """What the class's forward returns for a bare copy; None if it needs more arguments."""
    try:
        with (
            shipped_functions(),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
        ):
            own = _own_parameters(module) if made_up is None else {}
            bare = _bare(module, own | (parameters or {}), made_up)
            y = type(bare).forward(bare, *args, **kwargs)
    except Exception:  # third-party code may raise anything: it is not a known formula
        return None
    return y.detach() if isinstance(y, Tensor) else y


def _bare(module: nn.Module, parameters: dict[str, Tensor], made_up: torch.dtype | None) -> nn.Module:
    """A copy on the host with its class's methods, these parameters, and no hooks.

    Its children too: with parameters made up in this dtype, or copies of their own for None.
    """
    bare = copy.copy(module)
    give_code_from_disk(bare, type(module))
    state = bare.__dict__
    state.update({name: OrderedDict() for name in _HOOKS})
    state["_parameters"] = dict(parameters) | {k: None for k, p in module._parameters.items() if p is None}
    state["_buffers"] = {k: None if b is None else b.detach().to("cpu", copy=True) for k, b in module._buffers.items()}
    children = {name: child for name, child in module._modules.items() if child is not None}
    state["_modules"] = {
        name: _bare(child, _own_parameters(child) if made_up is None else _made_up_parameters(child, made_up), made_up)
        for name, child in children.items()
    }
    return bare


def _agree(y: Tensor, expected: Tensor, within: float) -> bool:
    error = (y.double() - expected.double()).abs()
    return bool((error <= within * (expected.double().abs() + expected.double().abs().mean(-1, keepdim=True))).all())
