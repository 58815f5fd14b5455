"""Tolerances for gradients, from host runs of the same code in which every operation rounds randomly (Monte Carlo)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import CHANNEL_SHARE, Judgement, judge_elements
from noisescope.localization.random_rounding import gain_along
from noisescope.localization.roundoff_floors import SLACK, Z_ELEMENT, Reference, number_format, operand_bits

Key = TypeVar("Key", bound=Hashable)

_RUNS = 6
_SEED = 23
# Units of round-off that a result moves by: 16-bit operations round once, those of float32 differ between libraries.
_UNITS, _UNITS_FLOAT32 = 2.0, 8.0
_ULPS, _ULPS_FLOAT32 = 1.0, 4.0  # beside what the runs show: the last rounding
_EXACT_NAMES = """
clone detach alias zeros zeros_like ones_like new_zeros new_empty empty_like full_like copy_ fill_ zero_ cat stack
index_select embedding gather where masked_fill slice_backward select_backward constant_pad_nd neg relu threshold
threshold_backward abs sign sgn maximum minimum clamp clamp_min clamp_max amax amin
"""
_EXACT = frozenset(_EXACT_NAMES.split())


def moved(x: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    """Each element perturbed randomly by some units of round-off (of this dtype) of itself and of its row's rms."""
    if not x.is_floating_point() or not x.numel() or x.dtype.itemsize < 2:
        return x
    form = number_format(x.dtype if dtype is None else dtype)
    u = _UNITS * form.u
    if form.bits > 20:
        u = max(_UNITS_FLOAT32 * form.u, 2.0 ** (1 - operand_bits()))
    wide = x.double()
    finite = torch.where(wide.isfinite(), wide, 0.0)
    if bool((finite == finite.round()).all()):  # counts, masks and indices are exact
        return x
    scale = finite.abs() + (finite.square().mean(-1, keepdim=True).sqrt() if x.dim() else 0.0) / 4
    steps = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (wide + u * scale * steps).to(x.dtype)


class RoundingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Perturbs the result of every inexact operation, in the forward and in autograd's backward.

    Operations are computed in float64 and rounded: on a CPU, kernels of the model's dtype are those under test.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, returns = func.overloadpacket.__name__, func._schema.returns
        if name in _EXACT or (name == "_to_copy" and result.dtype.itemsize >= args[0].dtype.itemsize):
            return result
        aliases = [each.alias_info for each in returns if each.alias_info is not None]
        if any(each.is_write for each in aliases):
            return tree_map_only(Tensor, lambda x: x.copy_(moved(x, self._generator)), result)
        if aliases:
            return result
        result = _in_float64(func, args, kwargs or {}, result)
        return tree_map_only(Tensor, lambda x: moved(x, self._generator), result)


class KeepFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts of float64 to a shorter dtype, as in `x.float()` or `softmax(x, dtype=torch.float32)`, do nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        shorter = kwargs.get("dtype") or torch.float64
        if func.overloadpacket.__name__ == "_to_copy" and args[0].dtype == torch.float64 and shorter.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _in_float64(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The result of an operation, computed in float64 and rounded once to the dtypes of its own result."""
    kinds = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()}
    if not kinds or torch.float64 in kinds or "dtype" in kwargs or "scaled_dot_product" in func.overloadpacket.__name__:
        return result  # a fused kernel rounds inside

    def wide(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    try:
        found = func(*tree_map_only(Tensor, wide, args), **tree_map_only(Tensor, wide, kwargs))
    except RuntimeError:  # no kernel for float64
        return result
    return tree_map(lambda x, own: x.to(own.dtype) if isinstance(x, Tensor) else x, found, result)


@dataclass(frozen=True)
class Expected:
    """A gradient in float64, the tolerance of each element, and the tolerance of a common factor."""

    values: Tensor
    limit: Tensor
    gain: float


def expected_gradients(
    exact: Mapping[Key, Tensor | None],
    dtypes: Mapping[Key, torch.dtype],
    rounded: Callable[[torch.Generator], Mapping[Key, Tensor | None]],
) -> dict[Key, Expected]:
    """Exact gradients, with tolerances from runs of the same code with random rounding."""
    runs = [rounded(torch.Generator("cpu").manual_seed(_SEED + number)) for number in range(_RUNS)]
    return {
        key: _expected(value, [run.get(key) for run in runs], dtypes[key])
        for key, value in exact.items()
        if value is not None
    }


def _expected(value: Tensor, runs: Sequence[Tensor | None], dtype: torch.dtype) -> Expected:
    values = value.double()
    off = torch.stack([torch.zeros_like(values) if run is None else run.double() - values for run in runs])
    variance = torch.where(off.isfinite(), off, 0.0).square().mean(0)
    pooled = variance.mean(-1, keepdim=True) if variance.dim() else variance
    form = number_format(dtype)
    wide = form.bits > 20
    ulp = form.ulp(torch.where(values.isfinite(), values, 0.0))
    limit = Z_ELEMENT * (variance + pooled).sqrt() + (_ULPS_FLOAT32 if wide else _ULPS) * ulp + 2 * form.flushed
    gains = [gain_along(each, values) for each in off]
    spread = math.sqrt(sum(gain**2 for gain in gains) / len(gains))
    return Expected(values, limit, Z_ELEMENT * spread + 2 * CHANNEL_SHARE * form.u * (4 if wide else 1))


def as_rows(got: Tensor, expected: Expected, *, tokens: bool) -> Recomputed:
    """A gradient and its expected value as rows and channels; `tokens` says whether rows are tokens of the forward."""
    width = got.shape[-1] if got.dim() else 1
    lead = tuple(got.shape[:-1]) if tokens else ()
    values, limit = (x.reshape(-1, width) for x in (expected.values, expected.limit))
    return Recomputed(got.reshape(-1, width), Reference(values, (limit / 2,)), lead=lead)


def judge_gradient(found: Recomputed, gain: float) -> Judgement:
    """Check elements against their tolerances, and the overall size along the expected direction."""
    result = judge_elements(found.y, found.reference)
    y, values, form = found.y.double(), found.reference.values, number_format(found.y.dtype)
    off = gain_along(y - values, values)
    result.tests += 1
    result.mean_ulp = off / (1.44 * form.u)
    result.strengths["signed"] = abs(off) / gain if gain else 0.0
    larger = torch.maximum(y.abs(), values.abs()).nan_to_num(0.0, posinf=0.0)
    result.visible_element = float((SLACK * found.reference.bound / form.ulp(larger)).median())
    result.visible_gain = gain or math.inf
    result.visible_mean = result.visible_gain / (1.44 * form.u)
    return result
