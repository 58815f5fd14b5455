"""One operator's errors with everything that may explain them: bits, channels, lanes of the inner dimension."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.host_products import Recomputed, Weighing
from noisescope.localization.judge import RMS_LIMIT, Judgement, tolerance
from noisescope.localization.roundoff_floors import Z_MEAN, Format, Reference, number_format
from noisescope.localization.row_pattern import RowPlaces, row_words
from noisescope.localization.tensors import bits_of, lane_period, on_host

_MOST_ELEMENTS = 1 << 22
_MOST_NAMED = 4096  # channels that are listed one by one
_EXPLAINED = 0.9  # share of the error's energy, or
_FITTED = 2.0  # what is left over, in units of two healthy roundings
_MOST_LANES = 1536  # of the inner dimension, in a least-squares fit
_MOST_COLUMNS = 512
_WIDTHS = (16, 32, 64, 128)


@dataclass
class Pattern:
    """A fault class, the confidence in it, and the numbers behind it."""

    fault_class: str
    confidence: float
    text: str = ""
    channels: tuple[int, ...] = ()
    period: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[int, int], ...] = ()  # (sequence, token) of wrong rows, where they are at most half of all
    row_words: str = ""


@dataclass(frozen=True)
class Evidence:
    """Output and reference [R, C], in float64 except `native`."""

    operator: str
    native: Tensor
    y: Tensor
    reference: Reference
    limit: Tensor
    bad: Tensor  # beyond tolerance, or not finite on one side only
    concerned: tuple[int, ...]  # channels with alarms
    operands: tuple[Tensor, Tensor] | None
    x: Tensor | None
    form: Format
    index: Tensor  # [R], which rows of the whole output these are
    places: RowPlaces
    weighing: Weighing | None = None

    @classmethod
    def of(
        cls, operator: str, recomputed: Recomputed, judgement: Judgement, batch: tuple[int, int] | None = None
    ) -> Evidence:
        """Collect the evidence; `batch`, the shape [B, T] of the model's input, distinguishes tokens from heads."""
        y, reference = recomputed.y, recomputed.reference
        index = torch.arange(len(y)) if recomputed.rows is None else recomputed.rows
        lead = recomputed.lead if math.prod(recomputed.lead) >= len(y) else ()
        rows = max(1, _MOST_ELEMENTS // max(1, y.shape[1]))
        operands = recomputed.operands
        if operands is not None:  # a weight may still be where it was multiplied
            operands = (operands[0], on_host(operands[1]))
        if len(y) > rows:
            y, index = y[:rows], index[:rows]
            reference = reference[:rows]
            one = operands is not None and operands[0].shape[0] == 1
            operands = (operands[0][:, :rows], operands[1]) if operands is not None and one else None
        form = number_format(y.dtype)
        wide, values = y.double(), reference.values
        limit = torch.zeros_like(values) if reference.exact else tolerance(reference)
        inside = values.isfinite() & (values.abs() - limit <= form.largest * (1 + form.u))
        finite = wide.isfinite() & inside
        bad = torch.where(finite, (wide - values).abs() > limit, wide.isfinite() != inside)
        x = None if recomputed.x is None else recomputed.x[: len(y)]
        concerned = tuple(sorted(judgement.channels))
        places = RowPlaces.of(lead, index, operator, batch)
        weighing = recomputed.weighing if len(y) == len(recomputed.y) else None
        return cls(operator, y, wide, reference, limit, bad, concerned, operands, x, form, index, places, weighing)

    def kept(self) -> Evidence:
        """A copy without the operands, which may be large, and with its own memory."""
        return dataclasses.replace(self, native=self.native.clone(), operands=None, x=None, weighing=None)

    def part(self, rows: Tensor, channels: tuple[int, int]) -> Evidence:
        """A subset of rows, with alarms in a range of channels."""
        operands = self.operands
        if operands is not None:
            operands = (operands[0][:, rows], operands[1]) if operands[0].shape[0] == 1 else None
        return dataclasses.replace(
            self,
            native=self.native[rows],
            y=self.y[rows],
            reference=self.reference[rows],
            limit=self.limit[rows],
            bad=self.bad[rows],
            concerned=tuple(range(*channels)),
            operands=operands,
            x=None if self.x is None else self.x[rows],
            index=self.index[rows],
            places=self.places[rows],
            weighing=None,
        )

    @property
    def values(self) -> Tensor:
        return self.reference.values

    @functools.cached_property
    def fits(self) -> Tensor:
        """Where the reference is finite in the output's format."""
        return self.values.isfinite() & (self.values.abs() <= self.form.largest)

    @functools.cached_property
    def error(self) -> Tensor:
        return torch.where(self.y.isfinite() & self.fits, self.y - self.values, 0.0)

    @functools.cached_property
    def columns(self) -> Tensor:
        """The elements of the affected channels, [R, C]; all of them if the alarm names none."""
        mask = torch.zeros(self.y.shape[1], dtype=torch.bool)
        mask[list(self.concerned) if self.concerned else slice(None)] = True
        return mask.expand_as(self.bad)

    @functools.cached_property
    def scale(self) -> float:
        """rms of the reference."""
        values = self.values[self.fits]
        return math.sqrt(float(values.square().mean())) if values.numel() else 1.0

    @functools.cached_property
    def variance(self) -> Tensor:
        """Twice a healthy error's variance (faulty results are rounded again), at the larger of value and output."""
        larger = torch.maximum(self.values.abs(), torch.where(self.y.isfinite(), self.y.abs(), 0.0))
        rounding = self.form.ulp(larger.clamp_max(self.form.largest)).square() / 12
        return (self.reference.variance + rounding).clamp_min(1e-300)

    def weights(self) -> Tensor:
        """Inverse variances of the affected elements, 0 elsewhere."""
        return torch.where(self.columns & self.fits & self.y.isfinite(), 1 / self.variance, 0.0)

    def along(self, direction: Tensor) -> float:
        """The size of a pattern in the error, by least squares."""
        weight = self.weights()
        direction = torch.where(weight > 0, direction, 0.0)
        total = float((direction.square() * weight).sum())
        return float((self.error * direction * weight).sum()) / total if total > 0 else 0.0

    def explains(self, pattern: Tensor) -> bool:
        """Whether little error remains after subtracting a pattern."""
        weight = self.weights()
        pattern = torch.where(weight > 0, pattern, 0.0)
        before = float((self.error.square() * weight).sum())
        after = float(((self.error - pattern).square() * weight).sum())
        count = max(1, int((weight > 0).sum()))
        return before > 0 and after < 0.5 * before and (after < (1 - _EXPLAINED) * before or after / count < _FITTED)

    def chi(self, where: Tensor) -> float:
        """Mean (e / sigma)^2 of some elements."""
        if not bool(where.any()):
            return 0.0
        if self.reference.exact:
            return float((self.error[where] != 0).any())
        return float((self.error[where].square() / self.reference.variance[where].clamp_min(1e-300)).mean())

    # -- rows

    @functools.cached_property
    def loud(self) -> Tensor:
        """Elements beyond tolerance, or so far off that few of their neighbours can be."""
        if self.reference.exact:
            return self.bad
        return self.bad | (self.error.square() > 4 * self.reference.variance)

    @functools.cached_property
    def healthy_rows(self) -> Tensor:
        """Rows without an element beyond tolerance and with a healthy rms error, [R]."""
        fine = ~self.bad.any(1)
        count = int(self.columns[0].sum())
        if self.reference.exact or count == 0:
            return fine
        squares = torch.where(self.columns, self.error.square() / self.reference.variance.clamp_min(1e-300), 0.0)
        return fine & (squares.sum(1) / count < RMS_LIMIT + Z_MEAN * math.sqrt(2 / count))

    def name_rows(self, pattern: Pattern) -> None:
        """Add the rows beyond tolerance to a pattern, unless they are nearly all rows."""
        wrong = self.bad.any(1)
        few = 0 < int(wrong.sum()) * 2 <= len(wrong)
        if few and not pattern.row_words:
            pattern.row_words = row_words(wrong, self.places)
        if few and self.places.tokens:
            pattern.rows = self.places[wrong].pairs()

    # -- bits

    def constant_bits(self) -> list[tuple[int, int]]:
        """(bit, value) pairs that never change in the affected channels although they do in the reference."""
        inside = self.columns & self.native.isfinite()  # the bits of a NaN say nothing
        given, expected = bits_of(self.native[inside]), bits_of(self.values[inside].to(self.native.dtype))
        if given.numel() < 32:
            return []
        found = []
        for bit in range(8 * given.element_size()):
            share = float(((given >> bit) & 1).double().mean())
            should = float(((expected >> bit) & 1).double().mean())
            if (share > 0.999 and should < 0.95) or (share < 0.001 and should > 0.05):
                found.append((bit, round(share)))
        return found

    def mended_by(self, bit: int) -> float:
        """Share of the wrong elements that flipping one bit corrects; 1 if none is wrong."""
        if not bool(self.bad.any()):
            return 1.0
        given = bits_of(self.native[self.bad])
        top = bit == 8 * given.element_size() - 1
        mask = -(1 << bit) if top else 1 << bit
        mended = (given ^ mask).view(self.native.dtype).double()
        slack = self.limit[self.bad] + (self.form.ulp(self.values[self.bad].nan_to_num(0.0)) if bit < 2 else 0.0)
        return float(((mended - self.values[self.bad]).abs() <= slack).double().mean())

    # -- channels

    @functools.cached_property
    def reported(self) -> tuple[int, ...]:
        """The channels to report: none if most are affected, or if each was hit once by chance."""
        if not self.concerned or len(self.concerned) > min(_MOST_NAMED, 0.5 * self.y.shape[1]):
            return ()
        hits = int(self.bad.sum()) / len(self.concerned)
        return self.concerned if hits >= 2 or len(self.concerned) <= 8 or not bool(self.bad.any()) else ()

    @functools.cached_property
    def period(self) -> int | None:
        """The stride of the affected channels, if at least half of their lane is affected."""
        return lane_period(self.reported, self.y.shape[1], least=0.5)


def input_pattern(e: Evidence) -> Pattern | None:
    """Dead or scaled input lanes, or truncated operands."""
    if e.operands is None:
        return None
    lanes, size, explained = _lanes(e)
    if explained and lanes:
        text = f"{len(lanes)} lanes of the inner dimension are weighted by {1 + size:.3g} (such as lane {lanes[0]})"
        details = {"input_lanes": lanes}
        if abs(size + 1) < 0.25:
            return Pattern("dead input lane", 0.95, text, details=details)
        block = aligned_block(lanes, e.operands[0].shape[-1])
        return Pattern("block scale" if block is not None else "gain", 0.85, text, details=details)
    keep = _short_operands(e)
    if keep is not None:
        return Pattern("truncation", 0.9, f"as if the operands had {keep} bits of mantissa", details={"keep": keep})
    return None


def _lanes(e: Evidence) -> tuple[tuple[int, ...], float, bool]:
    """Lanes of the inner dimension that are lost or scaled, by how much, and whether that explains the error.

    If lane k counts 1 + c_k times, the error is e_rn = sum_k c_k a_rk b_kn. Least squares over all elements needs only
    K x K numbers, since the Gram matrix of those patterns is a product element by element:

        G = (A^T A) o (B B^T), G c = diag(A^T E B^T)
    """
    assert e.operands is not None
    a, b = e.operands[0], e.operands[1].double()  # [B, M, K], [B, K, C]
    weight = e.weights()
    error = torch.where(weight > 0, e.error, 0.0).reshape(a.shape[0], a.shape[1], -1)
    number = a.shape[-1]
    gained = (a * (error @ b.transpose(-1, -2))).sum((0, 1))  # diag(A^T E B^T)
    energy = (a.square().sum(1) * b.square().sum(2)).sum(0)
    top = torch.arange(number)
    if number > _MOST_LANES:
        top = (gained.square() / energy.clamp_min(1e-300)).topk(_MOST_LANES).indices.sort().values
    a, b = a[..., top], b[:, top]
    gram = ((a.transpose(-1, -2) @ a) * (b @ b.transpose(-1, -2))).sum(0)
    gram.diagonal().add_(1e-9 * float(gram.diagonal().max()) + 1e-300)
    counts = torch.linalg.solve(gram, gained[top])
    strong = counts.abs() > 0.5 * float(counts.abs().max())
    if float(counts.abs().max()) < 0.05 or int(strong.sum()) > 0.5 * number:
        return (), 0.0, False
    size = float(counts[strong].median())
    fit = ((a[..., strong] * size) @ b[:, strong]).reshape(e.y.shape)
    alike = float((counts[strong] - size).abs().max()) < 0.3 * abs(size)
    return tuple(top[strong].tolist()), size, alike and e.explains(fit)


def _short_operands(e: Evidence) -> int | None:
    """The apparent number of mantissa bits of the operands: 10 is TF32, 7 is bfloat16."""
    assert e.operands is not None
    a, b = e.operands
    columns = slice(0, _MOST_COLUMNS)
    exact = a @ b[..., columns].double()
    weight = e.weights().reshape(a.shape[0], a.shape[1], -1)[..., columns]
    error = e.error.reshape(a.shape[0], a.shape[1], -1)[..., columns]
    before = float((error.square() * weight).sum())
    best: tuple[float, int] | None = None
    for keep in range(1, e.form.bits - 1):
        for rounding in (torch.trunc, torch.round):
            change = shorten(a, keep, rounding) @ shorten(b[..., columns].double(), keep, rounding) - exact
            after = float(((error - change).square() * weight).sum())
            if best is None or after < best[0]:
                best = (after, keep)
    return best[1] if best is not None and best[0] < 0.2 * before else None


def shorten(x: Tensor, keep: int, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """x in float64 with `keep` mantissa bits after the leading one, by torch.trunc or torch.round."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(rounding(torch.ldexp(mantissa, torch.tensor(keep + 1))), exponent - (keep + 1))


def aligned_block(channels: tuple[int, ...], width: int) -> tuple[int, int] | None:
    """[start, stop) if the channels are one run that starts and ends on a block boundary (16, 32 ...), and not all."""
    if len(channels) < _WIDTHS[0] or len(channels) >= width:
        return None
    start, stop = channels[0], channels[-1] + 1
    whole = stop - start == len(channels)
    return (start, stop) if whole and any(start % w == 0 and stop % w == 0 for w in _WIDTHS) else None
