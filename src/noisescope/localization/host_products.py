"""Recomputes matrix products and attention on the host in float64, from the operands that the device received."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from noisescope.localization.product_checksums import BLOCK as BLOCK
from noisescope.localization.product_checksums import Checker, columns_on_host
from noisescope.localization.product_checksums import as_multiplied as as_multiplied
from noisescope.localization.product_checksums import checksums as checksums
from noisescope.localization.roundoff_floors import (
    ROUNDING_STD,
    WORK_ROUNDOFF,
    Reference,
    Shortening,
    number_format,
    rounded_once,
    shortened,
    sum_grain,
    sum_spread,
    truncated_attention,
)
from noisescope.localization.tensors import host_rows, on_host

_PARTIAL_SUMS = 8
_MOST_PRODUCTS = 1 << 29  # multiply-adds of q k^T up to which every row of attention is recomputed


@dataclass(frozen=True)
class Weighing:
    """The scores of an attention call, including those of masked keys, and the values they weight, by output row."""

    scores: Tensor  # [B, T, S], B for each sequence and head
    hidden: Tensor  # [B, T, S]
    values: Tensor  # [B, S, D]
    seen: Tensor  # [B T], rows that are judged


@dataclass(frozen=True)
class Recomputed:
    """One operator's output and its expected value, as rows and channels."""

    y: Tensor  # [R, C], the device's numbers, on the host, in their dtype
    reference: Reference
    operands: tuple[Tensor, Tensor] | None = None  # a [B, M, K], b [B, K, C] with B M = R: what a product summed
    x: Tensor | None = None  # [R, C] where the operator is a function of each element of its input
    checksums: int = 0  # rows that were checked by checksums alone
    lead: tuple[int, ...] = ()  # the whole output's shape before its last dimension; () where rows are no tokens
    rows: Tensor | None = None  # which rows of the whole output these are, in their order; None for all
    weighing: Weighing | None = None  # of attention, how it weighs its values

    def part(self, first: int, lead: tuple[int, ...]) -> Recomputed:
        """The call whose rows start at `first`, from several merged calls; `lead` is the shape of its own rows."""
        index = torch.arange(len(self.y)) if self.rows is None else self.rows
        begin, end = torch.searchsorted(index, torch.tensor([first, first + math.prod(lead)])).tolist()
        here = slice(begin, end)
        operands = None if self.operands is None else (self.operands[0][:, here], self.operands[1])
        whole = end - begin == math.prod(lead)
        rows = None if whole else index[here] - first
        x = None if self.x is None else self.x[here]
        return Recomputed(self.y[here], self.reference[here], operands, x, lead=lead, rows=rows)


class Rows:
    """Which output rows are recomputed: all if there are few, else a sample that includes the first and the last."""

    def __init__(self, most: int, seed: int, device: str = "cpu") -> None:
        self.most = most
        self.device = device  # that computed the output: what it may shorten depends on it
        self._first = self._last = 0
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def around(self, first: int, last: int) -> Rows:
        """The same selection plus all of the first rows and one of the last rows."""
        found = copy.copy(self)
        found._first, found._last = first, last
        seed = torch.randint(1 << 40, (), generator=self._generator, device="cpu")
        found._generator = torch.Generator("cpu").manual_seed(int(seed))  # its own: several are used side by side
        return found

    def choose(self, total: int) -> Tensor | None:
        """Sorted indices; None for all rows."""
        rest = total - self._first - self._last
        if rest <= self.most and self._last < 2:
            return None
        sample = torch.arange(rest, device="cpu")
        if rest > self.most:
            order = torch.randperm(rest - 2, generator=self._generator, device="cpu")[: max(self.most - 2, 0)] + 1
            sample = torch.cat([order, torch.tensor([0, rest - 1], device="cpu")]).sort().values
        ends = torch.arange(self._first, device="cpu"), torch.arange(total - 1, total, device="cpu")
        return torch.cat([ends[0], sample + self._first, ends[1][: self._last]])

    def signs(self, count: int) -> Tensor:
        """Random +-1."""
        return torch.randint(0, 2, (count,), generator=self._generator, device="cpu").double() * 2 - 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, rows: Rows) -> Recomputed:
    """x [..., K] times weight [N, K]; with many rows, checksums decide which to recompute besides the sample."""
    a, out = host_rows(x), host_rows(y)
    a = as_multiplied(a, out)
    added = None if bias is None else as_multiplied(on_host(bias), out).double()
    chosen = rows.choose(len(a))
    short = shortened(out.dtype, rows.device)
    check = None if chosen is None else Checker(a, added, out, rows.signs(len(weight)), short)
    total, every = len(a), (a, out)
    if chosen is not None:
        a, out = a[chosen], out[chosen]
    found = _multiply(a.double(), weight, out, check)
    if check is not None and chosen is not None:
        off = check.found().rows_off()
        more = torch.tensor(sorted({*off[: rows.most].tolist()} - {*chosen.tolist()}), dtype=torch.long)
        if len(more):
            chosen, order = torch.cat([chosen, more]).sort()
            again = _multiply(every[0][more].double(), weight, out)
            found = Sums(*(torch.cat(pair)[order] for pair in zip(found, again, strict=True)))
            a, out = every[0][chosen], every[1][chosen]
    reference = _sum_reference(found, a.shape[-1], out.dtype, added, short)
    unsampled = 0 if chosen is None else total - len(chosen)
    operands = a.double()[None], as_multiplied(weight.detach(), out).T[None]
    return Recomputed(out, reference, operands, checksums=unsampled, lead=tuple(y.shape[:-1]), rows=chosen)


class Sums(NamedTuple):
    """A product a b, and what its error depends on, all in float64."""

    values: Tensor
    squares: Tensor  # S^2 + P^2
    sizes: Tensor  # the largest number of the row of a, plus that of the column of b


def _multiply(a: Tensor, weight: Tensor, y: Tensor, check: Checker | None = None) -> Sums:
    """a w^T, some columns at a time.

    S^2 only scales a tolerance, so it is summed in float32, of numbers up to 1: other squares may leave its range.
    """
    values, squares, sizes = (a.new_empty(len(a), len(weight)) for _ in range(3))
    a_size = _largest(a)
    a_squared = (a / a_size).square().float()
    for here, part in columns_on_host(weight, y):
        wide, size = part.double(), _largest(part)
        values[:, here], squares[:, here] = _partial_sums(a, wide)
        scaled = (a_squared @ (part / size).float().square().T).double()
        squares[:, here] += scaled * (a_size * size.double().T).square()
        sizes[:, here] = a_size + size.T
        if check is not None:
            check.see(here, wide, part.float().square())
    return Sums(values, squares, sizes)


def _largest(x: Tensor) -> Tensor:
    """The largest number of each row, never 0 or infinite."""
    form = torch.finfo(x.dtype)
    return x.abs().amax(-1, keepdim=True).clamp(form.smallest_normal, form.max)


def _partial_sums(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """a w^T in float64, and P^2: the mean square of the partial sums at a few positions of the inner dimension."""
    inner = a.shape[-1]
    parts = min(_PARTIAL_SUMS, max(1, inner // 16))
    edges = [inner * at // parts for at in range(parts + 1)]
    terms = ((a[..., i:j], w[..., i:j].transpose(-1, -2)) for i, j in itertools.pairwise(edges))
    total = torch.matmul(*next(terms))
    squares = total.square()
    for term in terms:
        total = total.addmm_(*term) if total.dim() == 2 else total.add_(torch.matmul(*term))
        squares.addcmul_(total, total)
    return total, squares.div_(parts)


def _sum_reference(sums: Sums, terms: int, dtype: torch.dtype, added: Tensor | None, short: Shortening) -> Reference:
    """The tolerance of a sum of products: its own error, that of an addend, and the rounding of the result.

    Operands below the normal numbers may be taken as 0, and so may products: then each term is off by as much times the
    other operand, or by as much.
    """
    u, (values, squares, sizes) = WORK_ROUNDOFF, sums
    if added is not None:
        squares = squares + added.square()  # some kernels start from the addend: then it is in every partial sum
    spread = sum_spread(terms, squares, values, u)
    grain = sum_grain(terms, squares, values, max(u, short.spread))
    if short.spread:
        spread = (spread.square() + short.spread**2 * squares.double()).sqrt()
    systematic = short.lean * (values.abs() + squares.double().sqrt()) if short.lean else None
    bounds: tuple[Tensor, ...] = ()
    if added is not None:
        bounds = (rounded_once(values, dtype),)  # others round the product before they add
        grain = grain + 2 * bounds[0]
        values = values + added
    flushed = terms * number_format(dtype).flushed * (1 + sizes)
    if bool((values.abs() < flushed).any()):  # of which all may be 0
        systematic = values.abs().minimum(flushed) + (0.0 if systematic is None else systematic)
    bounds = (rounded_once(values, dtype) + flushed, *bounds)
    return Reference(values, bounds, spread, systematic, grain, offset=added is not None, sums=True)


def batched(
    a: Tensor, b: Tensor, y: Tensor, rows: Rows, *, addend: Tensor | None = None, alpha: float = 1.0
) -> Recomputed:
    """alpha a b + addend, a [..., M, K], b [..., K, N]: the products inside attention, with rows of M sampled."""
    short = shortened(y.dtype, rows.device)
    a, b, out = (as_multiplied(on_host(t), y) for t in (a, b, y))
    a = a[None] if a.dim() == 1 else a
    b = b[:, None] if b.dim() == 1 else b
    lead = (a[..., 0, 0] + b[..., 0, 0]).shape
    out = out.reshape(*lead, a.shape[-2], b.shape[-1])
    added = None if addend is None else on_host(addend).double().expand_as(out)
    chosen = rows.choose(a.shape[-2])
    if chosen is not None:
        a, out = a[..., chosen, :], out[..., chosen, :]
        added = None if added is None else added[..., chosen, :]
    wide, other = a.double(), b.double()
    values, squares = _partial_sums(wide, other.transpose(-1, -2))
    values = values * alpha
    squares = (squares + torch.matmul(wide.square(), other.square())) * alpha**2
    sizes = (_largest(wide) + _largest(other.mT).mT).expand_as(values) * abs(alpha)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(-1, t.shape[-1])

    added = None if added is None else flat(added)
    reference = _sum_reference(Sums(*map(flat, (values, squares, sizes))), a.shape[-1], out.dtype, added, short)
    left = wide.expand(*lead, *wide.shape[-2:]).reshape(-1, *wide.shape[-2:])
    right = other.expand(*lead, *other.shape[-2:]).reshape(-1, *other.shape[-2:]) * alpha
    whole = (*lead, y.numel() // max(1, out.shape[-1] * math.prod(lead)))
    return Recomputed(flat(out), reference, (left, right), lead=whole, rows=in_each(whole, chosen))


def in_each(lead: tuple[int, ...], chosen: Tensor | None) -> Tensor | None:
    """Rows of the last leading dimension, in each of the others, as rows of the whole output."""
    if chosen is None:
        return None
    return (torch.arange(math.prod(lead[:-1]))[:, None] * lead[-1] + chosen).reshape(-1)


def grouped(x: Tensor, weights: Tensor, ends: Tensor, y: Tensor, rows: Rows) -> Recomputed:
    """Products of experts: rows up to ends[0] of x [R, K] with weights[0] [K, N], up to ends[1] with weights[1], ..."""
    a, out = on_host(x), on_host(y)
    stops = on_host(ends).long()
    total = int(stops[-1])  # rows beyond belong to no expert
    expert = torch.searchsorted(stops, torch.arange(total), right=True)
    chosen = rows.choose(total)
    chosen = torch.arange(total) if chosen is None else chosen
    a, out, expert = as_multiplied(a[chosen], out), out[chosen], expert[chosen]
    wide = a.double()
    found = Sums(*(wide.new_empty(out.shape) for _ in range(3)))
    for number in sorted(set(expert.tolist())):
        here = expert == number
        for every, part in zip(found, _multiply(wide[here], weights[number].detach().T, out), strict=True):
            every[here] = part
    reference = _sum_reference(found, a.shape[-1], out.dtype, None, shortened(out.dtype, rows.device))
    return Recomputed(out, reference)


def einsum(equation: str, a: Tensor, b: Tensor, y: Tensor, rows: Rows) -> Recomputed:
    """An einsum of any two operands; sums of squares use the same equation."""
    wide, other, out = as_multiplied(on_host(a), y).double(), as_multiplied(on_host(b), y).double(), on_host(y)
    values = torch.einsum(equation, wide, other)
    squares = torch.einsum(equation, wide.square(), other.square())
    terms = max(1, round(math.sqrt(wide.numel() * other.numel() / max(1, values.numel()))))  # K, or more
    sizes = (wide.abs().amax() + other.abs().amax()).expand_as(values)
    flat = [t.reshape(-1, t.shape[-1]) for t in (out, values, squares, sizes)]
    reference = _sum_reference(Sums(*flat[1:]), terms, out.dtype, None, shortened(out.dtype, rows.device))
    return Recomputed(flat[0], reference, lead=tuple(y.shape[:-1]))


def _common_rounding(p: Tensor, dtype: torch.dtype) -> float:
    """By how much the roundings of all probabilities to 16 bits change their sum, relative, on average.

    Nearly equal scores give probabilities that are all rounded the same way: the rows then share a gain. A kernel
    rounds them before or after it divides by their sum, and few kernels sum the rounded ones.
    """
    if dtype.itemsize != 2:
        return 0.0
    each = (p, p / p.amax(-1, keepdim=True).clamp_min(1e-300))
    change = [((x.to(dtype).double() - x).sum(-1) / x.sum(-1).clamp_min(1e-300)).mean().abs() for x in each]
    return float(torch.stack(change).amax())


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    y: Tensor,
    rows: Rows,
    *,
    is_causal: bool,
    scale: float | None,
) -> Recomputed:
    """A fused attention call: query [..., H, T, D], key and value [..., KV, S, D]; query rows are sampled.

    Its tolerance: probabilities are rounded to the inputs' dtype before they multiply the values (16-bit kernels do
    this), scores have the error of their sum, the exponential that of its argument, and the result is rounded once:
    spread^2 = u^2/3 sum (p v)^2 + sum p^2 ds^2 (v - y)^2 + the sum's own.
    """
    q, k, v, out = (as_multiplied(on_host(t), y) for t in (query, key, value, y))
    dtype, length = out.dtype, q.shape[-2]
    form, u = number_format(dtype), WORK_ROUNDOFF
    work = q.shape[:-1].numel() * k.shape[-2] * q.shape[-1]
    chosen = None if work <= _MOST_PRODUCTS else rows.choose(length)
    at = torch.arange(length) if chosen is None else chosen
    q, out = q[..., at, :].double(), out[..., at, :]
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:  # grouped queries
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    k, v = k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    size = torch.matmul(q.square(), k.square().transpose(-1, -2)).sqrt() * scale  # S of each score
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    if is_causal:
        hidden |= torch.arange(scores.shape[-1]) > at[:, None]
    if mask is not None:
        given = on_host(mask)
        given = given[..., at, :] if given.shape[-2] == length else given
        if given.dtype == torch.bool:
            hidden |= ~given
        else:
            out_of_sight = given.double() < -1e4  # the usual ways to write -inf
            scores = scores + given.double().masked_fill(out_of_sight, 0.0)
            hidden |= out_of_sight.expand_as(hidden)
    every = v.expand(*scores.shape[:-2], *v.shape[-2:])
    weighed = [t.reshape(-1, *t.shape[-2:]) for t in (scores, hidden, every)]
    scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    values, partial = _partial_sums(p, v.transpose(-1, -2))
    sum_error = ROUNDING_STD * u * math.sqrt(q.shape[-1] + 1) * (size + (scores.abs()).masked_fill(hidden, 0.0))
    short = shortened(dtype, rows.device)
    sum_error = sum_error + short.spread * size
    score_error = (sum_error + u * (4 + 2 * (top - scores).masked_fill(hidden, 0.0))).masked_fill(hidden, 0.0)
    weight = (p * score_error).square()
    spread = torch.matmul(weight, v.square()) - 2 * values * torch.matmul(weight, v)
    spread = (spread + values.square() * weight.sum(-1, keepdim=True)).clamp_min(0)
    pv = torch.matmul(p.square(), v.square())
    spread = spread + (form.u**2 / 3 + short.spread**2) * pv + sum_spread(p.shape[-1], pv + partial, values, u).square()
    grain = sum_grain(p.shape[-1], pv, values, max(u, short.spread))
    lean = short.lean * (values.abs() + pv.sqrt())
    cut_sums, cut_scores = truncated_attention(dtype, rows.device, q.shape[-1])
    leans = short.lean + cut_scores > 0
    if leans:  # scores that are all too small by one share make the probabilities more even
        off = p * (scores - (p * scores.masked_fill(hidden, 0.0)).sum(-1, keepdim=True)).masked_fill(hidden, 0.0).abs()
        uneven = torch.matmul(off, v.abs()) + off.sum(-1, keepdim=True) * values.abs()
        lean = lean + (short.lean + cut_scores) * uneven + cut_sums * torch.matmul(p, v.abs())
    # A row that may look nowhere gives what its kernel likes, and a kernel may skip NaN that the mask hides.
    seen = (~hidden.all(-1) & values.isfinite().all(-1)).reshape(-1)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(-1, t.shape[-1])[seen]

    values = flat(values)
    # Fused kernels have a quick exp2 (at most 2 ulp of float32 off) and a quick reciprocal (1 ulp): they lean one way.
    systematic = (6 * u + _common_rounding(p, dtype)) * values.abs() + flat(lean)
    bounds = (rounded_once(values, dtype), *((flat(lean),) if leans else ()))
    reference = Reference(values, bounds, flat(spread.sqrt()), systematic, grain=flat(grain), sums=True)
    lead = tuple(y.shape[:-1])
    index = in_each(lead, at)
    found = None if index is None else index[seen]
    weighing = Weighing(weighed[0], weighed[1], weighed[2], seen)
    return Recomputed(flat(out), reference, lead=lead, rows=found, weighing=weighing)
