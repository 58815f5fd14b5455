"""Calls 16-bit norms, softmax and fused attention again on the device, with inputs that reveal their internals.

In 16 bits, one rounding of the output hides a lot: a norm that was never computed in float32, an exponential from a
short polynomial, an rsqrt after one Newton step. Such errors are the same for a whole row, or for all numbers of one
size, while rounding errors are not, so many synthetic rows reveal them (driven_judgement.py).

A norm receives rows of all sizes. Softmax and attention receive two keys, one of which scores d less than the other:
the weight of that key is exp(-d) / (1 + exp(-d)), and its value passes to the output. The calls are made inside one
more forward, at the point where the model makes its own: on the same instance, inside the open scopes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.localization.formula_recognition import norm_formula
from noisescope.localization.host_copies import tensors_in
from noisescope.localization.host_operators import given_one_tensor, host_arithmetic
from noisescope.localization.laws.calls_with_other_inputs import Handler, Listening
from noisescope.localization.tensors import on_host
from noisescope.model.anatomy import ATTENTION, Anatomy, Unit
from noisescope.probe.recorded_call import RecordedCall
from noisescope.probe.unfused_attention import FUSED_FUNCTION
from noisescope.sites import FUSED, Site

_DRIVEN = ("norm", "softmax", FUSED)
_ROWS = (64, 512)  # of a norm, fewest and most
_ELEMENTS = 1 << 15  # of a norm's input, where that leaves enough rows
_MASSIVE = 1.7  # of the root of a row's energy: three quarters of it are in one number
_WEIGHTS = 6144  # exponentials that one attention call takes
_NEAR, _FAR = 1.45, 8.0  # how far the other key is below: two octaves of exp, and where 16-bit weights still count
_FAR_SHARE = 0.25
_HEADS, _WIDTH = 4, 16  # of a call of attention whose own shapes are not known
_ALONE = 32  # tokens given to a module that no forward calls
_TABLE_ROWS, _TABLE_BYTES = 1 << 12, 1 << 26  # of an embedding that are looked up: as many as either allows


@dataclass(frozen=True)
class DrivenNorm:
    """The output of a norm for synthetic rows."""

    unit: Unit
    site: Site
    callee: nn.Module
    x: Tensor
    y: Tensor  # on the host


@dataclass(frozen=True)
class DrivenWeights:
    """The weights of keys that score d below another, as computed by softmax or attention."""

    site: Site
    callee: Any
    depth: Tensor  # d, in float64
    weight: Tensor  # exp(-d) / (1 + exp(-d)) as computed, in float64
    channels: int  # that say the same
    dtype: torch.dtype  # of the output
    given: torch.dtype
    unseen: bool = False  # the model calls a function in its place that no one sees


def input_alone(module: nn.Module, operators: tuple[str, ...], generator: torch.Generator) -> Tensor | None:
    """What a linear, a norm or a table can be called with outside a forward; None for any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta:
        return None
    if type(module) is nn.Embedding:
        most = max(_TABLE_ROWS, _TABLE_BYTES // (weight.shape[-1] * weight.itemsize))
        rows = torch.linspace(0, len(weight) - 1, min(most, len(weight)), dtype=torch.float64)
        return rows.round().long()[None].to(weight.device)
    if type(module) is nn.Linear or (operators == ("norm",) and weight.dim() == 1):
        return torch.randn(2, _ALONE, weight.shape[-1], generator=generator).to(weight)
    return None


@dataclass
class DrivenCalls:
    """The calls that were made; inputs that a module does not accept are skipped."""

    norms: list[DrivenNorm] = field(default_factory=list)
    weights: list[DrivenWeights] = field(default_factory=list)


def drive(
    model: nn.Module, anatomy: Anatomy, run: Callable[[], Any], *, seed: int, without: frozenset[Site] = frozenset()
) -> DrivenCalls:
    """Drive every 16-bit norm, softmax and fused attention call while `run` runs the model, except at `without`."""
    driver = _Driver(seed, without)
    wanted = [unit for unit in anatomy.units if unit.kind == ATTENTION or set(unit.operators) & set(_DRIVEN)]
    with Listening(model, Anatomy(anatomy.architecture, anatomy.blocks, tuple(wanted)), driver.choose):
        run()
    if F.scaled_dot_product_attention is not FUSED_FUNCTION:  # replaced by a function that no one sees being called
        driver.replaced_attention(model, anatomy)
    return driver.found


def is_driven(operator: str, given: Any) -> bool:
    """Whether a call can be driven."""
    x = next((x for _, x in tensors_in(given)), None) if operator in _DRIVEN else None
    return x is not None and _is_short(x)


class _Driver:
    def __init__(self, seed: int, without: frozenset[Site]) -> None:
        self.found = DrivenCalls()
        self._done = set(without)
        self._seed = seed
        self._made: dict[tuple[Any, ...], Any] = {}  # inputs by their shapes: all layers get the same

    def choose(self, unit: Unit, operator: str) -> Handler | None:
        return self._drive if operator in _DRIVEN else None

    def _drive(self, call: RecordedCall) -> None:
        x = call.first_input
        if call.site in self._done or x is None or not _is_short(x):
            return
        self._done.add(call.site)
        try:
            if call.operator == "norm":
                self._norm(call, x)
            elif call.operator == "softmax":
                self._softmax(call, x)
            else:
                self._attention(call)
        except Exception:  # third-party code may raise anything: then it is not tested
            return

    def _norm(self, call: RecordedCall, like: Tensor) -> None:
        callee, width = call.callee, like.shape[-1]
        if not isinstance(callee, nn.Module) or not given_one_tensor(call.args, call.kwargs):
            return
        if like.shape != call.tensors[1].shape or norm_formula(callee, width) is None:
            return
        inner = like.shape[2:-1].numel() if like.dim() > 3 else 1
        count = min(max(_ELEMENTS // width, _ROWS[0]), _ROWS[1])
        rows = max(1, -(-count // inner))
        lead = (1, rows, *like.shape[2:-1]) if like.dim() > 2 else (rows,)
        x = self._once(("norm", lead, width, like.dtype), lambda: self._rows(lead, width, like.dtype))
        y = call.again(x.to(like.device))
        with host_arithmetic():
            self.found.norms.append(DrivenNorm(call.unit, call.site, callee, x, on_host(y)))

    def _rows(self, lead: tuple[int, ...], width: int, dtype: torch.dtype) -> Tensor:
        """Normally distributed numbers of many sizes; most rows have one massive element, whose square matters."""
        generator, count = self._generator(), math.prod(lead)
        size = torch.exp2(torch.rand((count, 1), generator=generator) * 4 - 2)
        x = torch.randn((count, width), generator=generator)
        channel = torch.randint(width, (count,), generator=generator)
        massive = torch.arange(count) % 4 != 0
        x[massive, channel[massive]] = _MASSIVE * math.sqrt(width)
        return (x * size).to(dtype).reshape(*lead, width)

    def _softmax(self, call: RecordedCall, like: Tensor) -> None:
        dim = call.argument(1, "dim", default=-1)
        if dim not in (-1, like.dim() - 1):
            return
        lead = (1,) * (like.dim() - 2)
        for dtype in (like.dtype, torch.float32):
            x = self._once(("scores", lead, dtype), lambda: self._scores(lead, dtype))  # noqa: B023
            y = call.again(x.to(like.device))
            with host_arithmetic():
                depth, weight = -x.reshape(-1, 2)[:, 1].double(), on_host(y).reshape(-1, 2)[:, 1].double()
                self.found.weights.append(DrivenWeights(call.site, call.callee, depth, weight, 1, y.dtype, dtype))

    def _scores(self, lead: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Scores 0 and -d."""
        below = -self._depths(_WEIGHTS)
        return torch.stack([torch.zeros_like(below), below], -1).to(dtype).reshape(*lead, _WEIGHTS, 2)

    def _attention(self, call: RecordedCall) -> None:
        given = call.attention
        query, key, value = given.query, given.key, given.value
        if query.dim() != 4 or given.dropout_p:
            return
        named = {"enable_gqa": True} if given.enable_gqa else {}
        shapes = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            y = call.repeat(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=given.scale, **named)
            assert isinstance(y, Tensor)
            return y

        self._attend(call.site, attend, shapes, given.effective_scale, query)

    def _attend(
        self,
        site: Site,
        attend: Callable[..., Tensor],
        shapes: tuple[int, int, int, int],
        scale: float,
        like: Tensor,
        *,
        unseen: bool = False,
    ) -> None:
        for dtype in (like.dtype, torch.float32):
            made = self._once(("keys", shapes, scale, dtype), lambda: self._two_keys(shapes, scale, dtype))  # noqa: B023
            q, k, v, depth = made
            try:
                with torch.autocast(like.device.type, enabled=False):  # it would round these inputs
                    y = attend(*(t.to(like.device) for t in (q, k, v)))
            except Exception:  # some kernels take no float32, or no other lengths
                return
            with host_arithmetic():
                values = v[0, 0, 1].double()
                weight = (on_host(y).double() @ values / values.square().sum()).flatten()
                found = DrivenWeights(site, FUSED_FUNCTION, depth, weight, len(values), y.dtype, dtype, unseen)
                self.found.weights.append(found)

    def _two_keys(
        self, shapes: tuple[int, int, int, int], scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One key that scores 0 and has value 0, and another that scores -d; d per query.

        In 16 bits one number of the query has few different values; what it is short of d is in a second one.
        """
        heads, groups, width, channels = shapes
        rows = max(64, _WEIGHTS // heads)
        factor = (0.5 + torch.rand(groups, generator=self._generator())).to(dtype)
        each = factor.double().repeat_interleave(heads // groups)[:, None]
        wanted = self._depths(rows * heads).reshape(heads, rows) / (each * scale)
        q, k, v = (torch.zeros(s, dtype=dtype) for s in _shapes(heads, groups, rows, width, channels))
        q[0, :, :, 0] = wanted.to(dtype)
        q[0, :, :, 1:2] = (wanted - q[0, :, :, 0].double()).to(dtype)[..., None]
        k[0, :, 1, :2] = -factor[:, None]
        v[0, :, 1] = (1 + torch.arange(channels) / channels).to(torch.bfloat16).to(dtype)
        depth = q[0].double().sum(-1) * each * scale
        return q, k, v, depth.flatten()

    def _depths(self, count: int) -> Tensor:
        generator = self._generator()
        near = 0.02 + (_NEAR - 0.02) * torch.rand(count, generator=generator, dtype=torch.float64)
        far = _NEAR + (_FAR - _NEAR) * torch.rand(count, generator=generator, dtype=torch.float64)
        return torch.where(torch.rand(count, generator=generator) < _FAR_SHARE, far, near)

    def replaced_attention(self, model: nn.Module, anatomy: Anatomy) -> None:
        """Call F.scaled_dot_product_attention directly at every attention module whose own calls were not observed."""
        like = next((p for p in model.parameters() if _is_short(p)), None)
        driven = {site.module for site in self._done if site.operator == FUSED}
        shapes = (_HEADS, _HEADS, _WIDTH, _WIDTH)
        for unit in anatomy.units:
            if unit.kind == ATTENTION and unit.module not in driven and like is not None:
                attend = F.scaled_dot_product_attention
                self._attend(unit.site(FUSED), attend, shapes, 1 / math.sqrt(_WIDTH), like, unseen=True)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            with host_arithmetic():
                self._made[key] = make()
        return self._made[key]

    def _generator(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self._seed)


def _is_short(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def _shapes(heads: int, groups: int, rows: int, width: int, channels: int) -> tuple[tuple[int, ...], ...]:
    return (1, heads, rows, width), (1, groups, 2, width), (1, groups, 2, channels)
