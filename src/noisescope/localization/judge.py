"""Decides whether an operator's output is healthy: the tests, their limits and what they can detect.

============  ==================================================================================================
element       |e| beyond twice the limits of all roundings plus 7 standard deviations of the sums (1.3e-12 a tail, so
              a thousandth of an alarm in 10^9 elements)
non-finite    NaN or Inf on one side only
rms           mean (e / sigma)^2 above 1.5, significantly: noise smaller than an ulp
signed        mean error along the value's sign, or along +1, in ulps: a rounding mode, a small gain or offset; for the
              whole output and for each channel. Healthy sums leave 0.01 to 0.02 ulp (density falls within a cell); of
              functions only what lies beyond one correct rounding counts
bits          a bit that never changes in a channel where it should: a stuck bit, a short output path (stuck_bits.py)
exact         any difference, where the relation is exact
============  ==================================================================================================

e = output - reference, sigma^2 the model's variance. Rows that occur several times count once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescope.localization.roundoff_floors import (
    SLACK,
    Z_ELEMENT,
    Z_MEAN,
    Format,
    Reference,
    as_judged,
    mean_bound,
    number_format,
)
from noisescope.localization.stuck_bits import number_of_tests, stuck_channels
from noisescope.localization.tensors import differing, distinct_rows, elements_at_a_time, rms, rows_apart

# Limit of mean (e / sigma)^2. Null: sigma is an upper limit, so the mean is expected to be 1 at most (one rounding:
# exactly 1, uniform within half an ulp). Normal errors of n elements pass 1.5 + Z_MEAN sqrt(2 / n) with probability
# P(chi^2_n > n limit), 2e-11 for n = 64 and less for more; uniform ones, whose squares vary by 0.8 and not by 2, less
# often still. The half is for a sigma that is 20 % too small.
RMS_LIMIT = 1.5
MEAN_SHARE = 0.05  # ulp that the whole output's mean may be off; float32 sums: twice that
CHANNEL_SHARE = 0.1  # ulp for the mean of one channel
_MEAN_ROWS = 1024
_MEDIAN_OF = 4096  # tolerances of a piece
_ROUND_OFF = 2.0**-18  # of the rms, 64 units of float32's round-off: what differs by more rounds independently
TINY = 1e-300


@dataclass
class Judgement:
    """The test results for one call of an operator; strengths above 1 are alarms."""

    strengths: dict[str, float] = field(default_factory=dict)  # test -> statistic / limit
    worst: float = 0.0  # largest error
    worst_ulp: float = 0.0  # in ulps of the reference's own binade; where all must be equal, of its largest value
    bad: int = 0  # elements beyond their tolerance
    nonfinite: int = 0  # of these, finite on one side only
    elements: int = 0
    mean_ulp: float = 0.0  # along the sign of the value
    rms: float = 0.0  # sqrt(mean (e / sigma)^2)
    channels: set[int] = field(default_factory=set)  # with elements beyond the tolerance, or alarms of their own
    tests: int = 0
    visible_element: float = 0.0  # ulps: the median tolerance
    visible_mean: float = 0.0  # ulps: the smallest mean error that would have alarmed
    visible_gain: float = 0.0  # the same as a relative error
    visible_share: float = 0.0  # mean tolerance, as a share of the output's rms
    said: str = ""  # words of a test that has its own
    size: float = 0.0  # of the largest error of a law, relative to the output's rms
    within_round_off: bool = False  # a law broken bit for bit, but no more than another order of summation may do

    @property
    def alarm(self) -> bool:
        return self.strength > 1

    @property
    def strength(self) -> float:
        return max(self.strengths.values(), default=0.0)

    @property
    def share(self) -> float:
        """Of the elements, those beyond their tolerance."""
        return self.bad / max(1, self.elements)

    @property
    def rank(self) -> tuple[float, int]:
        """Of two alarms at one site, the one with the higher rank counts."""
        return self.strength, self.bad

    @property
    def test(self) -> str:
        return max(self.strengths, key=lambda name: self.strengths[name], default="")

    @property
    def words(self) -> str:
        """The errors as text. Means are not reported where no difference is allowed."""
        if self.said:
            return self.said
        exact = "exact" in self.strengths
        found = (
            f"{self.bad} of {self.elements} elements "
            f"{'differ (exact equality required)' if exact else 'exceed the tolerance'}"
        )
        found += f", {self.nonfinite} of them NaN or infinite on one side only" if self.nonfinite else ""
        most = f", worst {self.worst_ulp:.3g} ulp, mean {self.mean_ulp:+.3g} ulp away from zero"
        if exact:
            most = f", by up to {self.worst:.3g} ({self.worst_ulp:.3g} ulp of the largest element)"
        return found if self.nonfinite == self.bad > 0 else found + most

    def raise_to(self, test: str, strength: float) -> None:
        self.strengths[test] = max(self.strengths.get(test, 0.0), strength)


def tolerance(reference: Reference) -> Tensor:
    """The largest allowed error of one element."""
    limit = SLACK * reference.bound
    return limit if reference.spread is None else limit.add_(reference.spread, alpha=Z_ELEMENT)


def judge(y: Tensor, reference: Reference, *, probabilities: bool = False) -> Judgement:
    """All tests on one output [R, C]; of `probabilities` (a softmax) channels may stay at 0 or 1."""
    form = number_format(y.dtype)
    result = Judgement(elements=y.numel())
    if reference.exact:
        return judge_elements(y, reference)
    y = as_judged(y)
    # A token that occurs twice makes the same errors twice at layer 0.
    found_rows = distinct_rows(y, reference.values, among=range(0, len(y), max(1, -(-len(y) // _MEAN_ROWS))))
    rows = slice(None) if len(found_rows) == len(y) else torch.tensor(found_rows)
    means: list[Tensor] = []  # [7, columns] of each piece
    by_row = torch.zeros(2, len(y[rows]), dtype=torch.float64)
    tolerances: list[Tensor] = []
    bounds: list[Tensor] = []
    for start, part, ref in _pieces(y, reference):
        ulp, limit, error = form.ulp(ref.values), tolerance(ref), part - ref.values
        finite, one_sided = None, None
        size = error.abs()
        if not _all_ordinary(size, ulp, limit, form):
            one_sided = _one_sided(part, ref.values, limit, form)
            finite = part.isfinite() & ref.values.isfinite() & (ref.values.abs() <= form.largest)
            error, limit = torch.where(finite, error, 0.0), torch.where(finite, limit, 1.0)
            size = error.abs()
        strongest = float((size / limit).max())
        result.raise_to("element", strongest)
        result.worst = max(result.worst, float(size.max()))
        if one_sided is not None or not strongest <= 1:
            beyond = size > limit if one_sided is None else (size > limit) | one_sided
            result.bad += int(beyond.sum())
            result.nonfinite += 0 if one_sided is None else int(one_sided.sum())
            result.channels.update((start + beyond.any(0).nonzero().flatten()).tolist())
        result.worst_ulp = max(result.worst_ulp, float(size.div_(ulp).max()))
        tolerances.append(_normal_tolerances(limit, ulp, finite, form))
        bounds.append(_some_bounds(limit, ref.values))
        some = None if finite is None else finite[rows]
        means.append(_sums(error[rows], ref[rows], ulp[rows], some, by_row, y.dtype))
        result.tests += part.numel() + 2 * part.shape[1] + 4
    result.raise_to("non-finite", math.inf if result.nonfinite else 0.0)
    found = torch.cat(tolerances)
    result.visible_element = float(found.median()) if len(found) else 0.0
    result.visible_share = mean_bound(*torch.cat(bounds, 1))
    _judge_means(Means(*torch.cat(means, 1)), by_row, y[rows], reference.sums, form, result)
    whole, channels = stuck_channels(y[rows], reference[rows], below_one=probabilities)
    result.tests += number_of_tests(y.shape[1], y.dtype)
    result.raise_to("bits", math.inf if whole or channels else 0.0)
    result.channels.update(channels)
    if result.alarm and not result.bad:  # only all of them together: are they all numbers of their own?
        apart = rows_apart(reference.values, among=found_rows, share=_ROUND_OFF)
        if len(apart) < len(found_rows):  # one token repeated: its rows differ by round-off, and their errors less
            return dataclasses.replace(
                judge(y[apart], reference[apart], probabilities=probabilities), elements=y.numel()
            )
        columns = distinct_rows(y.T, reference.values.T)
        if len(columns) < y.shape[1]:
            again = judge(y[:, columns], reference[:, columns], probabilities=probabilities)
            alike = {columns[channel] for channel in again.channels}
            return dataclasses.replace(again, channels=alike, elements=result.elements)
    return result


def judge_elements(y: Tensor, reference: Reference) -> Judgement:
    """Each element alone against its tolerance, where means and bits have no known null distribution."""
    part, values, exact = y.double(), reference.values, reference.exact
    result = Judgement(elements=y.numel(), tests=y.numel(), visible_element=0.5)
    if not y.numel():
        return result
    limit = torch.zeros_like(values) if exact else SLACK * reference.bound
    finite = part.isfinite() & values.isfinite()
    one_sided = ~finite & differing(part, values)
    size = torch.where(finite, (part - values).abs(), 0.0)
    beyond = one_sided | ~(size <= limit)
    result.bad, result.nonfinite, result.worst = int(beyond.sum()), int(one_sided.sum()), float(size.max())
    if exact:
        result.strengths["exact"] = math.inf if result.bad else 0.0
    else:
        result.strengths["element"] = float((size / limit.clamp_min(TINY)).nan_to_num(math.inf).max())
        result.strengths["non-finite"] = math.inf if result.nonfinite else 0.0
    if result.bad:
        result.channels = set(beyond.reshape(-1, y.shape[-1]).any(0).nonzero().flatten().tolist())
        larger = torch.where(finite, torch.maximum(part.abs(), values.abs()), 0.0)
        # Sums that cancel are near 0, where ulps say nothing: if all must be equal, the largest element's count.
        result.worst_ulp = float((size / number_format(y.dtype).ulp(larger.max() if exact else larger)).max())
    return result


def judge_law(
    law: str,
    got: Tensor,
    expected: Tensor,
    bound: Tensor | None = None,
    *,
    scale: float | None = None,
    unit: str = "of the rms",
    round_off: Tensor | None = None,
) -> Judgement:
    """One law at one call, [R, C]: bit for bit, or within a bound for each element.

    scale: what sizes are relative to, where it is not the rms of `expected`
    round_off: what another order of summation may do; within it, a law is broken only on a stack that repeats itself
    """
    exact = Reference(expected, (), exact=True)
    result = judge_elements(got, exact if bound is None else Reference(expected, (bound.double() / SLACK,)))
    scale = max(rms(expected) if scale is None else scale, TINY)
    result.size = math.inf if result.nonfinite else result.worst / scale
    result.visible_share = 0.0 if bound is None or not bound.numel() else float(bound.median()) / scale
    result.strengths = {law: result.strength}
    if result.alarm:
        off = differing(got, expected)
        result.said = f"{law} off by {result.size:.2g} {unit} in {100 * result.share:.2f} %".replace("  ", " ")
        result.channels = set() if 2 * len(result.channels) > got.shape[-1] else result.channels
        result.within_round_off = round_off is not None and bool(((got - expected).abs() <= round_off)[off].all())
    return result


def judge_size(law: str, size: float, limit: float, scale: float, elements: int) -> Judgement:
    """A law of one number that stands for all elements."""
    result = Judgement({law: size / limit}, elements=elements, size=size / scale, visible_share=limit / scale)
    result.said, result.bad, result.tests = f"{law} off by {result.size:.2g} of the rms", elements, elements
    return result


@dataclass(frozen=True)
class Means:
    """Sums over the rows of each channel, [C], for a shift of d ulps in e = d ulp sign(y) + noise of sigma."""

    signed: Tensor  # ulp / sigma^2 e sign(y): d is its ratio to `weight`
    along: Tensor  # the same without the sign
    weight: Tensor  # (ulp / sigma)^2; 1 / sqrt(weight) is the standard error of d
    allowed: Tensor  # what functions may be off systematically
    scatter: Tensor  # squares of the terms of `signed`: its variance as seen
    squares: Tensor  # (e / sigma)^2
    count: Tensor

    def total(self) -> Means:
        return Means(*(field.sum(0, keepdim=True) for field in vars(self).values()))

    def limit(self, share: float, alike: Tensor | float = 1.0, scatter_of_rows: float = 0.0) -> Tensor:
        """What the sums may be: a share of an ulp, what functions may lean, and Z standard errors.

        Those are the model's, or the ones seen where they are smaller (blocked sums in float32); times the root of how
        many rows on average have one and the same error; or, if that is more, what the rows' own sums scatter by.
        """
        error = Z_MEAN * torch.minimum(self.weight, self.scatter).sqrt() * alike**0.5
        return share * self.weight + self.allowed + error.clamp_min(scatter_of_rows)

    def strength(self, limit: Tensor) -> Tensor:
        """The larger of both means relative to its limit."""
        return torch.where(self.weight > 0, torch.maximum(self.signed.abs(), self.along.abs()) / limit, 0.0)


def _pieces(y: Tensor, reference: Reference) -> Iterator[tuple[int, Tensor, Reference]]:
    step = max(1, elements_at_a_time() // max(1, len(y)))
    for start in range(0, y.shape[1], step):
        yield start, y[:, start : start + step].double(), reference[:, start : start + step]


def _all_ordinary(size: Tensor, ulp: Tensor, limit: Tensor, form: Format) -> bool:
    """Everything is finite and far from the end of the format: then there is nothing to tell apart.

    Of the errors' sizes, which are not finite where either side is not, and the spacing, which bounds the values.
    """
    return bool(ulp.max() / form.u + limit.max() < form.largest) and bool(size.max().isfinite())


def _normal_tolerances(limit: Tensor, ulp: Tensor, finite: Tensor | None, form: Format) -> Tensor:
    """Tolerances in ulps, of some elements that are well within the normal numbers: |v| > 2^(least + bits)."""
    some = slice(None, None, max(1, limit.numel() // _MEDIAN_OF))
    limit, ulp = limit.flatten()[some], ulp.flatten()[some]
    normal = ulp > 2.0**form.least
    return (limit / ulp)[normal if finite is None else normal & finite.flatten()[some]]


def _some_bounds(limit: Tensor, values: Tensor) -> Tensor:
    """Tolerances and values of some elements, [2, n]."""
    some = slice(None, None, max(1, limit.numel() // _MEDIAN_OF))
    return torch.stack([limit.flatten()[some], values.flatten()[some]])


def _one_sided(y: Tensor, values: Tensor, limit: Tensor, form: Format) -> Tensor:
    """Where only one side is finite (overflow of the format included)."""
    fits = values.isfinite() & (values.abs() + limit < form.largest)
    overflows = ~values.isfinite() | (values.abs() - limit > form.largest * (1 + form.u))
    return torch.where(y.isfinite(), overflows, fits)


def _sums(
    error: Tensor, reference: Reference, ulp: Tensor, finite: Tensor | None, by_row: Tensor, dtype: torch.dtype
) -> Tensor:
    """The fields of `Means` for some columns; the first two are added up in `by_row` [2, R] as well. `finite`: if any.

    One correct rounding of a function of numbers with few bits may lean: silu(x) = x / 2 + x^2 / 4 + ... of a small x
    in 16 bits is always rounded to x / 2. So means are those of what lies beyond it. Errors of long sums are their own.
    """
    variance, values = reference.variance, reference.values
    if finite is not None or not bool(variance.min() > 0):
        finite = variance > 0 if finite is None else finite & (variance > 0)
        variance = torch.where(finite, variance, torch.inf)
    lever = ulp / variance
    along = lever * (error if reference.sums else error - (values.to(dtype).double() - values))
    if finite is not None:
        along = torch.where(finite, along, 0.0)
    signed = torch.where(values < 0, -along, along)
    by_row[0] += signed.sum(1)
    by_row[1] += along.sum(1)
    fields = [signed.sum(0), along.sum(0), (lever * ulp).sum(0)]
    if reference.systematic is None:
        fields.append(torch.zeros_like(fields[0]))
    else:
        lean = lever.mul_(reference.systematic)
        fields.append((lean if finite is None else torch.where(finite, lean, 0.0)).sum(0))
    count = torch.full_like(fields[0], len(error)) if finite is None else finite.sum(0).double()
    fields += [along.square_().sum(0), error.square().div_(variance).sum(0), count]
    return torch.stack(fields)


def _judge_means(means: Means, by_row: Tensor, y: Tensor, sums: bool, form: Format, result: Judgement) -> None:
    """Check the mean of the whole output, and of each channel whose row errors are independent."""
    wider = 2 if form.bits > 20 else 1
    total = means.total()
    count, weight = float(total.count), float(total.weight)
    if count == 0 or weight == 0:
        return
    rows = _row_scatter(by_row)
    limit, ratio = total.limit(MEAN_SHARE * wider, 1.0, rows), float(total.squares) / count
    alike = 1.0
    if float(total.strength(limit)) > 1 or ratio > RMS_LIMIT:
        alike = float(_alike(y).sum()) / y.numel()
        limit = total.limit(MEAN_SHARE * wider, alike, rows)
    result.raise_to("signed", float(total.strength(limit)))
    result.raise_to("rms", ratio / (RMS_LIMIT + Z_MEAN * math.sqrt(2 * alike / count)))
    result.rms = math.sqrt(ratio)
    result.mean_ulp = float(total.signed) / weight
    result.visible_mean = min(float(limit) / weight, result.visible_element)  # by which every other element would alarm
    result.visible_gain = result.visible_mean * 1.44 * form.u  # an ulp is 2u to u of a value, 1.44u on average
    if sums:
        each = means.strength(means.limit(CHANNEL_SHARE * wider))
        doubtful = (each > 1).nonzero().flatten()
        if len(doubtful):
            few = Means(*(field[doubtful] for field in vars(means).values()))
            each[doubtful] = few.strength(few.limit(CHANNEL_SHARE * wider, _alike(y[:, doubtful]) / len(y)))
        result.raise_to("signed", float(each.max()))
        result.channels.update((each > 1).nonzero().flatten().tolist())


def _row_scatter(by_row: Tensor) -> float:
    """Z standard errors of a sum over rows, from the scatter of the rows: a norm's root is off for a whole row at once.

    The scatter is itself an estimate from R rows: Z becomes the quantile of Student's t (Wallace's approximation).
    """
    count = by_row.shape[1]
    if count < 2:
        return math.inf
    free = count - 1
    seen = (by_row - by_row.mean(1, keepdim=True)).square().sum(1) * count / free
    power = Z_MEAN**2 * max(free - 1.5, 0.5) / max(free - 1, 1) ** 2
    return math.sqrt(free * math.expm1(min(power, 700.0))) * float(seen.max().sqrt())


def _alike(y: Tensor) -> Tensor:
    """Sum over the rows of each channel of how many rows have the same number there, [C].

    Outputs that hardly vary (a large bias, a massive channel) all fall into one cell of their format: they share the
    same error, so averaging over them adds no information.
    """
    ordered = y.sort(0).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    cell = new.long().cumsum(0) - 1
    sizes = torch.zeros(y.shape, dtype=torch.float64).scatter_add_(0, cell, torch.ones(y.shape, dtype=torch.float64))
    return sizes.square().sum(0)
