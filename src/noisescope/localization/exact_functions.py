"""Functions that give the same bits on every healthy device: copies, views, choices, single IEEE operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.tensors import same_numbers

_SHAPES = """
view view_as reshape reshape_as permute transpose swapaxes movedim t T mT mH H flatten unflatten squeeze unsqueeze
expand expand_as broadcast_to broadcast_tensors contiguous clone detach chunk split tensor_split unbind narrow select
index_select gather scatter scatter_ take_along_dim take repeat repeat_interleave tile roll flip cat concat
concatenate stack hstack vstack pad unfold diagonal diag tril triu tril_ triu_ masked_fill masked_fill_ masked_select
where index_put index_put_ index_copy index_copy_ index_fill index_fill_ copy_ fill_ zero_ to type type_as float
double half bfloat16 long int bool cpu cuda numpy item tolist size dim numel ndimension stride storage_offset
is_contiguous data_ptr new_zeros new_ones new_full new_empty new_tensor zeros ones full empty zeros_like ones_like
full_like empty_like arange tensor as_tensor from_numpy eye meshgrid get_device is_floating_point is_complex
__getitem__ __setitem__ __len__ __contains__ requires_grad_ retain_grad set_ resize_ as_strided nonzero argwhere
one_hot embedding real imag view_as_complex view_as_real complex dropout isin _set_grad_enabled
set_grad_enabled
"""
_SINGLE = """
add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ rsub subtract mul mul_ __mul__ __rmul__ __imul__
multiply div div_ __div__ __truediv__ __rtruediv__ __itruediv__ true_divide floor_divide __floordiv__ remainder fmod
__mod__ neg __neg__ negative abs __abs__ absolute sign signbit square relu relu_ clamp clamp_ clamp_min clamp_min_
clamp_max clamp_max_ clip maximum minimum max min amax amin argmax argmin topk sort argsort round floor ceil trunc
sqrt eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ equal logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not __and__ __or__ __invert__ __xor__ any all isfinite isnan isinf nan_to_num bincount
histc unique searchsorted bucketize count_nonzero leaky_relu hardtanh relu6 threshold
"""
_RANDOM = """
rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform_ random_ bernoulli bernoulli_
multinomial exponential_ poisson cauchy_ geometric_ log_normal_
"""
_WITH_NUMBERS = frozenset({"add", "sub", "mul", "multiply", "subtract"})
_ROUNDED = _WITH_NUMBERS | {"to", "type", "type_as", "half", "bfloat16"}
_SINGLE_NAMES = frozenset(_SINGLE.split())
_RANDOM_NAMES = frozenset(_RANDOM.split())
_EXACT = frozenset(_SHAPES.split()) | _SINGLE_NAMES


def is_exact(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function's result depends neither on summation order nor on an approximation.

    Unknown functions count as inexact. Some devices round Python numbers to the tensor's dtype first, and divide by
    multiplying with the reciprocal.
    """
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):  # attributes such as shape, dtype, grad
        return True
    if name not in _EXACT:
        return False
    if name in _SINGLE_NAMES and any(isinstance(arg, Tensor) and arg.is_complex() for arg in args):
        return False  # two products and a sum, which one device fuses and another does not
    numbers = [arg for arg in args if isinstance(arg, float)]
    short = any(isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype.itemsize == 2 for arg in args)
    if numbers and "div" in name:
        return all(math.frexp(number)[0] in (0.5, -0.5) for number in numbers)
    return not (numbers and short and name.strip("_").lstrip("ri") in _WITH_NUMBERS) or all(map(_in_few_bits, numbers))


def is_random(function: Any) -> bool:
    return getattr(function, "__name__", "") in _RANDOM_NAMES


def rounds_once(function: Any) -> bool:
    """Whether it is a sum, a difference, a product or a cast: a fused kernel may leave their roundings out."""
    return getattr(function, "__name__", "").strip("_").lstrip("ri") in _ROUNDED


def _in_few_bits(number: float) -> bool:
    """Whether bfloat16 and float16 represent a number exactly."""
    return not math.isfinite(number) or float(torch.tensor(number, dtype=torch.bfloat16)) == number


CHOICES = frozenset({"sort", "argsort", "topk", "max", "min", "argmax", "argmin"})


def is_valid_choice(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether a device sorted, or chose the largest, correctly: of equal numbers any may come first."""
    x: Any = args[0] if args else kwargs.get("input")
    given = output if isinstance(output, tuple) else (output,)
    try:
        with torch._C.DisableTorchFunction():
            expected = function(*args, **kwargs)
            wanted = expected if isinstance(expected, tuple) else (expected,)
            if given[-1].is_floating_point():  # the largest alone, without its index
                return all(map(same_numbers, given, wanted))
            dim = _dimension(function.__name__, x, args, kwargs)
            flat = x.reshape(-1) if dim is None else x
            got, own = (flat.gather(dim or 0, _as_index(each[-1], flat, dim)) for each in (given, wanted))
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):  # another form of call than these
        return False
    distinct = True
    if function.__name__ in ("sort", "argsort", "topk"):
        order = given[-1].sort(dim if dim is not None else -1).values
        distinct = bool((order.diff(dim=dim if dim is not None else -1) != 0).all())
    return distinct and same_numbers(got, own) and all(map(same_numbers, given[:-1], wanted[:-1]))


def _dimension(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Along which the choice is made; None for the whole tensor."""
    at = 2 if name == "topk" else 1
    found = kwargs.get("dim", args[at] if len(args) > at else None)
    if isinstance(found, int) and not isinstance(found, bool):
        return found % max(1, x.dim())
    return max(0, x.dim() - 1) if name in ("sort", "argsort", "topk") else None


def _as_index(indices: Tensor, x: Tensor, dim: int | None) -> Tensor:
    """Indices in a form that gather accepts, with the dimension that a single choice loses."""
    if dim is None:
        return indices.reshape(1)
    return indices if indices.dim() == x.dim() else indices.unsqueeze(dim)
