"""Whether an operator's output is what healthy arithmetic gives: the tests, their limits and what they could have seen.

============  ==================================================================================================
element       |e| beyond twice the limits of all roundings plus 7 standard deviations of the sums (1.3e-12 a tail, so
              a thousandth of an alarm in 10^9 elements)
non-finite    NaN or Inf on one side only
rms           mean (e / sigma)^2 above 1.5, significantly: noise smaller than an ulp
signed        mean error along the value's sign, or along +1, in ulps: a rounding mode, a small gain or offset; for the
              whole output and for each channel. Healthy rounding leaves 0.01 to 0.02 ulp (density falls within a cell)
bits          a bit that never changes in a channel where it should: a stuck bit, a short output path
exact         any difference, where the relation is exact
============  ==================================================================================================

e = output - reference, sigma^2 the model's variance. Rows that occur several times count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from noisescope.locators.floors import Format, Reference, number_format

SLACK = 2.0  # on the limits of roundings, which add up only at worst
Z_ELEMENT = 7.0
Z_MEAN = 6.5  # 8e-11 two-sided: for up to 10^7 means (channels of all operators), 0.001 false alarms
RMS_LIMIT = 1.5  # of mean (e / sigma)^2
MEAN_SHARE = 0.05  # ulp that the whole output's mean may be off; float32 sums: twice that
CHANNEL_SHARE = 0.1  # ulp for the mean of one channel
_BIT_ROWS = 40  # different rows in which a bit must stay the same to be called stuck: 2^-39 by chance
_BIT_SHARE = 0.25
_PIECE = 1 << 20
_MEAN_ROWS = 1024
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Judgement:
    """What the tests say about one call of an operator; strengths above 1 are alarms."""

    strengths: dict[str, float] = field(default_factory=dict)  # test -> statistic / limit
    worst_ulp: float = 0.0  # largest error, in ulps of the reference's own binade
    bad: int = 0  # elements beyond their tolerance
    elements: int = 0
    mean_ulp: float = 0.0  # along the sign of the value
    offset_ulp: float = 0.0  # along +1
    rms: float = 0.0  # sqrt(mean (e / sigma)^2)
    channels: set[int] = field(default_factory=set)  # with elements beyond tolerance, or alarms of their own
    looks: int = 0
    visible_element: float = 0.0  # ulps: the median tolerance
    visible_mean: float = 0.0  # ulps: the smallest mean error that would have alarmed
    visible_gain: float = 0.0  # the same as a relative error

    @property
    def alarm(self) -> bool:
        return self.strength > 1

    @property
    def strength(self) -> float:
        return max(self.strengths.values(), default=0.0)

    @property
    def test(self) -> str:
        return max(self.strengths, key=lambda name: self.strengths[name], default="")

    def raise_to(self, test: str, strength: float) -> None:
        self.strengths[test] = max(self.strengths.get(test, 0.0), strength)


def tolerance(reference: Reference) -> Tensor:
    """How far one element may be off."""
    limit = SLACK * reference.bound
    return limit if reference.spread is None else limit + Z_ELEMENT * reference.spread


def judge(y: Tensor, reference: Reference, *, bits: bool = True) -> Judgement:
    """All tests on one output [R, C]; `bits=False` leaves out the one on bits (a softmax may be exactly 1 for ever)."""
    form = number_format(y.dtype)
    result = Judgement(elements=y.numel())
    if reference.exact:
        _judge_exact(y, reference, form, result)
        return result
    rows = _different_rows(y, reference.values)
    sums = np.zeros(6)  # of weighted sign e, e, weights, allowed, (e / sigma)^2, and squares of weighted e
    counted = 0
    medians: list[float] = []
    for start, part, ref in _pieces(y, reference):
        error, ulp = part - ref.values, form.ulp(ref.values)
        limit = tolerance(ref)
        one_sided = _one_sided(part, ref.values, limit, form)
        finite = part.isfinite() & ref.values.isfinite() & (ref.values.abs() <= form.largest)
        error = torch.where(finite, error, 0.0)
        beyond = (error.abs() > limit) | one_sided
        result.bad += int(beyond.sum())
        result.channels.update((start + beyond.any(0).nonzero().flatten()).tolist())
        result.raise_to("element", float((error.abs() / limit).max()))
        result.raise_to("non-finite", math.inf if bool(one_sided.any()) else 0.0)
        result.worst_ulp = max(result.worst_ulp, float((error.abs() / ulp).max()))
        seen = (limit / ulp)[(ref.values.abs() > 2.0 ** (form.least + form.bits)) & finite]
        medians.append(float(seen[:: max(1, len(seen) // 4096)].median()) if len(seen) else 0.0)
        counted += _means(error[rows], ref, ulp[rows], finite[rows], rows, form, start, result, sums)
        result.looks += part.numel() + 2 * part.shape[1] + 4
    _judge_means(sums, counted, form, result)
    result.visible_element = max(medians)
    if bits and len(rows) >= _BIT_ROWS:
        _judge_bits(y[rows], reference.values[rows], form, result)
    return result


def _pieces(y: Tensor, reference: Reference) -> Iterator[tuple[int, Tensor, Reference]]:
    step = max(1, _PIECE // max(1, len(y)))
    for start in range(0, y.shape[1], step):
        yield start, y[:, start : start + step].double(), reference.columns(start, start + step)


def _judge_exact(y: Tensor, reference: Reference, form: Format, result: Judgement) -> None:
    part, values = y.double(), reference.values
    differ = (part != values) & ~(part.isnan() & values.isnan())
    result.looks = part.numel()
    result.bad = int(differ.sum())
    result.channels = set(differ.any(0).nonzero().flatten().tolist())
    error = (part - values).abs() / form.ulp(values)
    result.worst_ulp = float(error.nan_to_num(0.0, posinf=0.0).max())
    result.visible_element = 0.5
    result.strengths["exact"] = math.inf if result.bad else 0.0


def _one_sided(y: Tensor, values: Tensor, limit: Tensor, form: Format) -> Tensor:
    """Not finite where it should be, or finite where it should not be (overflow of the format included)."""
    fits = values.isfinite() & (values.abs() + limit < form.largest)
    overflows = ~values.isfinite() | (values.abs() - limit > form.largest * (1 + form.u))
    return torch.where(y.isfinite(), overflows, fits)


def _different_rows(y: Tensor, values: Tensor) -> Tensor:
    """Indices of rows, each different one once: a token that occurs twice makes the same errors twice at layer 0."""
    rows = range(0, len(y), max(1, -(-len(y) // _MEAN_ROWS)))
    integers = y.contiguous().view(_INTEGERS[y.dtype.itemsize]).numpy()
    expected = values.contiguous().numpy()
    seen: dict[tuple[bytes, bytes], int] = {}
    for row in rows:
        seen.setdefault((integers[row].tobytes(), expected[row].tobytes()), row)
    return torch.tensor(sorted(seen.values()))


def _means(
    error: Tensor,
    reference: Reference,
    ulp: Tensor,
    finite: Tensor,
    rows: Tensor,
    form: Format,
    start: int,
    result: Judgement,
    sums: np.ndarray,
) -> int:
    """A shift of d ulps, e = d ulp sign(y) + noise of sigma, by least squares: for each channel, and into `sums`.

    Its standard error is the model's, or that of the errors seen where they are smaller (blocked sums in float32).
    """
    variance = reference.variance[rows]
    finite = finite & (variance > 0)
    variance = torch.where(finite, variance, torch.inf)
    values = reference.values[rows]
    lever = ulp / variance
    along = lever * error
    weights = lever * ulp
    allowed = torch.zeros_like(lever) if reference.systematic is None else lever * reference.systematic[rows]
    signed = along * values.sign()
    total = weights.sum(0)
    scatter = along.square().sum(0)
    share = CHANNEL_SHARE * (2 if form.bits > 20 else 1)
    for tested in (signed, along):
        limit = share * total + allowed.sum(0) + Z_MEAN * torch.minimum(total, scatter).sqrt()
        strength = torch.where(total > 0, tested.sum(0).abs() / limit, 0.0)
        result.raise_to("signed", float(strength.max()))
        result.channels.update((start + (strength > 1).nonzero().flatten()).tolist())
    chi = (error.square() / variance).sum()
    sums += [float(s) for s in (signed.sum(), along.sum(), total.sum(), allowed.sum(), chi, scatter.sum())]
    return int(finite.sum())


def _judge_means(sums: np.ndarray, counted: int, form: Format, result: Judgement) -> None:
    signed, along, weight, allowed, squares, scatter = sums.tolist()
    if counted == 0 or weight == 0:
        return
    share = MEAN_SHARE * (2 if form.bits > 20 else 1)
    limit = share * weight + allowed + Z_MEAN * math.sqrt(min(weight, scatter))
    result.raise_to("signed", max(abs(signed), abs(along)) / limit)
    result.mean_ulp, result.offset_ulp = signed / weight, along / weight
    result.visible_mean = limit / weight
    result.visible_gain = result.visible_mean * 1.44 * form.u  # an ulp is 2u to u of a value, 1.44u on average
    ratio = squares / counted
    result.rms = math.sqrt(ratio)
    result.raise_to("rms", ratio / (RMS_LIMIT + Z_MEAN * math.sqrt(2 / counted)))


def _judge_bits(y: Tensor, values: Tensor, form: Format, result: Judgement) -> None:
    """Bits that are the same in every row of a channel, though they differ in the reference rounded to the dtype."""
    normal = (values.abs() > 2.0 ** (form.least + form.bits)).all(0)  # what may be flushed says nothing
    if not bool(normal.any()):
        return
    given, expected = (
        t[:, normal].contiguous().view(_INTEGERS[y.dtype.itemsize]).numpy() for t in (y, values.to(y.dtype))
    )
    result.looks += given.shape[1] * 8 * given.itemsize
    ones = np.bitwise_and.reduce(given, 0) & ~np.bitwise_and.reduce(expected, 0)
    zeros = ~np.bitwise_or.reduce(given, 0) & np.bitwise_or.reduce(expected, 0)
    stuck = np.zeros(given.shape[1], dtype=bool)
    for held, other in ((ones, 0), (zeros, 1)):
        present = int(np.bitwise_or.reduce(held))
        for bit in (bit for bit in range(8 * given.itemsize) if (present >> bit) & 1):
            columns = np.flatnonzero((held >> bit) & 1)
            # A bit that all but one row share may differ there by healthy rounding: a quarter of the rows must.
            share = (((expected[:, columns] >> bit) & 1) == other).mean(0)
            stuck[columns[share > _BIT_SHARE]] = True
    if stuck.any():
        result.strengths["bits"] = math.inf
        result.channels.update(normal.nonzero().flatten()[torch.from_numpy(stuck)].tolist())
