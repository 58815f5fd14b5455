"""The laws of a fused attention call, softmax(scale q k^T + mask) v, and of softmax where it is called by itself.

V is ours to choose: V = 1 must give 1, V = I reads the probabilities back, one key must give its value, and the whole
is linear in V. Which operator broke shows in V = 1: an error that differs between channels comes
from the product with V, one that is the same in all channels from the normaliser, none at all from the scores or exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_products import as_multiplied
from noisescope.localization.laws import linear as linear_laws
from noisescope.localization.laws.call_results import LawEvidence, check_repeatability
from noisescope.localization.laws.calls_with_other_inputs import probe
from noisescope.localization.laws.functions import log_odds
from noisescope.localization.laws.linear import Linear
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import WORK_ROUNDOFF, number_format, product_roundoff
from noisescope.localization.tensors import host_rows
from noisescope.probe.recorded_call import RecordedCall

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_HIDDEN = -1e4  # a float mask below this lets nothing through
_SHIFT = 30.0  # of the scores: past exp's range in float16, far from it once the maximum is subtracted


@dataclass(frozen=True)
class Attention:
    """A call of scaled_dot_product_attention, with keys and values expanded to the number of query heads."""

    function: Callable[..., Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    @classmethod
    def recorded(cls, recorded: RecordedCall) -> Attention:
        given = recorded.attention
        q, k, v = (as_multiplied(each, recorded.output) for each in (given.query, given.key, given.value))
        if k.shape[-3] != q.shape[-3]:
            groups = q.shape[-3] // k.shape[-3]
            k, v = (probe(t, lambda t: t.repeat_interleave(groups, -3)) for t in (k, v))
        return cls(recorded.repeat, q, k, v, given.attn_mask, bool(given.is_causal), given.effective_scale)

    def __call__(self, **changed: Any) -> Tensor:
        call = replace(self, **changed)
        return call.function(
            call.q, call.k, call.v, attn_mask=call.mask, dropout_p=0.0, is_causal=call.causal, scale=call.scale
        )

    @property
    def sees_nothing(self) -> bool:
        """Whether a mask hides all keys from some query."""
        with host_arithmetic():
            return self.mask is not None and bool(masked_out(self.mask.detach().cpu()).all(-1).any())

    def read(self, q: Tensor, k: Tensor) -> Tensor:
        """Probabilities [B, H, T, n] of n <= D keys without a mask, by V = I."""
        with host_arithmetic():
            eye = torch.eye(k.shape[-2], self.v.shape[-1], dtype=q.dtype, device="cpu")
            value = eye.expand(*k.shape[:-1], -1).contiguous().to(q.device)
        return self(q=q, k=k, v=value, mask=None, causal=False)[..., : k.shape[-2]]


def masked_out(mask: Tensor) -> Tensor:
    """Where a mask hides a key from a query: False in a boolean mask, a very low number in another."""
    return ~mask if mask.dtype == torch.bool else mask < _HIDDEN


def examine(recorded: RecordedCall) -> LawEvidence:
    """Test all laws of one fused call."""
    call = Attention.recorded(recorded)
    if call.q.dim() != 4 or not call.q.is_floating_point() or call.q.numel() == 0:
        return LawEvidence(skipped=["attention laws: the call does not have the shape [batch, heads, tokens, size]"])
    # Grouped queries have another layout, and perhaps another kernel; operands may be rounded already (autocast).
    unlike = call.k is not recorded.attention.key
    if call.sees_nothing:  # padding: the output of such rows is undefined
        call, unlike = replace(call, mask=None, causal=False), True
    # Linear in V: rows of V^T [B, H, D, S] are independent, and S is the length of the sums.
    linear = Linear(
        lambda x: call(v=x.transpose(-1, -2)).transpose(-1, -2),
        call.v.transpose(-1, -2),
        call.k.shape[-2],
        free_rows=False,
        channels=False,
        view=lambda out: host_rows(out.permute(0, 3, 1, 2).flatten(-2)),  # [B, H, D, T] -> rows B T, channels H D
    )
    found, base = linear_laws.examine(linear, None if unlike else recorded.output.transpose(-1, -2))
    if found.broken:
        linear_laws.probe_suspect(linear, base, found)
    for drive in (call, *_wider(call)):
        _ones(drive, found)
        _single_key(drive, found)
        _probabilities(drive, found)
    _later_keys(call, recorded.output, found)
    if unlike:
        again = recorded.again(call.q)
        with host_arithmetic():
            first = host_rows(recorded.output).double()
            limit = 8 * number_format(recorded.output.dtype).ulp(first)
            found.check(Law.REPEAT, host_rows(again).double(), first, round_off=limit)
    if found.broken:
        other = probe(call.q, lambda t: t.roll(1, -2))
        check_repeatability(recorded.again, call.q, recorded.output, other, found.facts)
    return found


def _wider(call: Attention) -> list[Attention]:
    """The call with float32 operands, whose rounding hides nothing; autocast is off, as it would round them again."""
    if call.q.dtype.itemsize >= 4:
        return []
    mask = call.mask
    mask = probe(mask, Tensor.float) if mask is not None and mask.is_floating_point() else mask
    q, k, v = (probe(t, Tensor.float) for t in (call.q, call.k, call.v))
    wide = replace(call, q=q, k=k, v=v, mask=mask)
    return [wide] if _one_key(wide).dtype == torch.float32 else []


def _one_key(call: Attention) -> Tensor:
    """The first query on the first key."""
    q, k, v = (t[..., :1, :] for t in (call.q, call.k, call.v))
    return call(q=q, k=k, v=v, mask=None, causal=False)


def _ones(call: Attention, found: LawEvidence) -> None:
    """The rows of P sum to 1."""
    out = call(v=probe(call.v, torch.ones_like))
    with host_arithmetic():
        got = out.detach().cpu().double()
        keys = call.k.shape[-2]
        form, u = number_format(call.q.dtype), product_roundoff(call.q.dtype)
        # The rounding of the result, that of each p (in 16 bits before the product), and two sums of S terms.
        limit = torch.full_like(
            got, 2 * form.ulp(torch.ones(1, dtype=torch.float64)).item() + 4 * u * (8 + math.sqrt(keys))
        )
        flat = [t.transpose(1, 2).flatten(0, 1).flatten(-2) for t in (got, torch.ones_like(got), limit)]  # [B T, H D]
        if found.check(Law.PROBABILITIES_SUM_TO_ONE, *flat, unit="").alarm:
            within = got.amax(-1) - got.amin(-1)
            found.facts.ones = "channels" if float(within.max()) > 2 * float(limit.max()) else "rows"


def _single_key(call: Attention, found: LawEvidence) -> None:
    """exp(0) / exp(0) = 1, so one key gives its value."""
    out = _one_key(call)
    with host_arithmetic():
        expected = call.v[..., :1, :].detach().cpu().double().flatten(1)
        got = out.detach().cpu().double().flatten(1)
        u = product_roundoff(call.q.dtype)
        limit = 2 * number_format(call.q.dtype).ulp(expected) + 8 * u * expected.abs()
        found.check(Law.SINGLE_KEY, got, expected, limit)


def _probabilities(call: Attention, found: LawEvidence) -> None:
    """Key shift and log-odds on as many keys as fit, and keys in another order."""
    keys = min(call.k.shape[-2], call.v.shape[-1])
    if keys < 2:
        found.skipped.append(f"{Law.KEY_SHIFT}, {Law.LOG_ODDS}: one key only")
        return
    q, k = call.q[..., -keys:, :], call.k[..., :keys, :]
    with host_arithmetic():
        grid, moved = (t.to(k.device) for t in _shifted_keys(q.detach().cpu(), k.detach().cpu(), call.scale))
    p = call.read(q, k)
    doubled = call.read(probe(q, lambda t: 2 * t), k)
    plain, shifted = call.read(q, grid), call.read(q, moved)
    rolled = call.read(q, probe(k, lambda t: t.roll(1, -2)))
    with host_arithmetic():
        sizes = [_score_size(q, keys_, call.scale) for keys_ in (k, grid, moved)]
        found.add(log_odds(Law.LOG_ODDS, p, doubled, 2.0, 3 * sizes[0]))
        found.add(log_odds(Law.KEY_SHIFT, plain, shifted, 1.0, sizes[1] + sizes[2]))
        found.facts.shift_overflows |= bool(shifted.isnan().any())
        if call.q.dtype.itemsize >= 4:
            found.facts.read = (p, q, k, call.scale)
        order = log_odds(Law.ROW_ORDER, p.roll(1, -1), rolled, 1.0, 2 * sizes[0].roll(1, -1))
        found.add(order)


def _shifted_keys(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Keys on a grid on which adding c is exact, and the same with c added; c lifts the last query's scores by 30."""
    last = q[..., -1:, :].float()
    c = _SHIFT * last / (scale * last.square().sum(-1, keepdim=True).clamp_min(1e-6))
    room = number_format(k.dtype).largest / 16  # a query near 0 would ask for keys beyond float16
    c = c * (room / c.abs().amax(-1, keepdim=True).clamp_min(room))
    largest = (k.float().abs().amax((-1, -2), keepdim=True) + c.abs().amax(-1, keepdim=True)).clamp_min(1e-6)
    bits = number_format(k.dtype).bits - 1
    step = torch.exp2(torch.ceil(torch.log2(largest)) - bits)  # the spacing of the dtype at the largest number
    grid, c = (k.float() / step).round() * step, (c / step).round() * step
    return grid.to(k.dtype), (grid + c).to(k.dtype)


def _score_size(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """sum_d |q_d k_d| scale: what the rounding of a score is relative to."""
    a, b = q.detach().cpu().double().abs(), k.detach().cpu().double().abs()
    return (a @ b.transpose(-1, -2)) * abs(scale)


def _later_keys(call: Attention, y: Tensor, found: LawEvidence) -> None:
    """Change the keys and values that a query may not see; its output must not change."""
    total, length = call.k.shape[-2], call.q.shape[-2]
    late = total - total // 3
    if total < 3:
        return
    if call.causal:
        blind = torch.arange(length) < late
        blind = blind.expand(*call.q.shape[:2], -1)
    elif call.mask is not None:
        mask = call.mask.detach().cpu().expand(*call.q.shape[:2], length, total)
        blind = masked_out(mask)[..., late:].all(-1)
    else:
        return
    seen = (y.detach().cpu() != 0).any(-1)
    if not bool((blind & seen).any()):
        return
    k = probe(call.k, lambda t: torch.cat([t[..., :late, :], -2 * t[..., late:, :]], -2))
    v = probe(call.v, lambda t: torch.cat([t[..., :late, :], 4 * t[..., late:, :].flip(-1)], -2))
    out = call(k=k, v=v)
    with host_arithmetic():
        a, b = out.detach().cpu().double()[blind], y.detach().cpu().double()[blind]
        scale = float(b.square().mean().sqrt())
        form = number_format(y.dtype)
        limit = 8 * form.ulp(b) + 8 * form.u * scale + 64 * WORK_ROUNDOFF * scale
        found.check(Law.CAUSALITY, a, b, limit)
