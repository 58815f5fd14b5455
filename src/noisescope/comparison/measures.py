"""Measures of how far apart two tensors are: errors, where they are, and what sketches show of them.

MAPE is mean |a - b| / max(|a|, rms(a) / 10), a the reference: elements near 0 would otherwise dominate (a 16-bit model
may show 22 % in a layer whose relative L2 error is 0.8 %). The original method notes' own formula, with |a| + 1e-8
below, stands beside it as `mape_notes`. An ulp is the spacing of the tensor's own dtype at the reference's value.

NaN and infinite elements are never averaged away. Where the sides have them at other elements, or of another kind, no
measure is given and the difference is infinite. Where both have the same ones, the measures are of the finite rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from noisescope.findings import LIMITS

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Sketch = tuple[Array, Array]  # of one site: numbers [prompts, m] and norms [prompts]

MAPE_FLOOR = 0.1  # of the reference's rms
_NOTES_FLOOR = 1e-8
_MOSTLY = 0.5  # of a typical difference: less is no gain, though it may be significant
_GAIN_ERRORS = 4  # standard errors from 0: a record has hundreds of sites
# Under so many sketch numbers (40) a gain would have to be larger than the errors' own median to be significant.
LEAST_FOR_GAIN = math.ceil((_GAIN_ERRORS * math.pi / 2) ** 2)
_FORMATS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126), "float64": (53, -1022)}


@dataclass(frozen=True)
class WorstElement:
    """An element: prompt, token, channel (the last dimension), and what either side has there."""

    prompt: int
    token: int
    channel: int
    a: float
    b: float
    outlier_channel: bool  # the reference's channel is larger than 10 x the median channel


@dataclass(frozen=True)
class Measures:
    """The measures of one site; None if a sketch does not show them, or no finite elements are left to measure.

    `infinite`: no relative L2 is large enough, as one side alone has NaN or infinite elements, or only the reference is
    all zeros. `relative_error` is the standard error of an estimated relative L2. Non-finite elements are counted; of a
    sketch the prompts that have some.
    """

    relative_l2: float | None = None
    infinite: bool = False
    cosine: float | None = None
    gain: float | None = None  # b is larger by this share throughout; 0 where none stands out, None: `common_gain`
    relative_error: float = 0.0
    mae: float | None = None
    mape: float | None = None
    mape_notes: float | None = None
    pearson: float | None = None
    max_error: float | None = None
    mean_ulp: float | None = None
    max_ulp: float | None = None
    nonfinite: int = 0  # NaN or infinite on one side only, or another such value on either
    nonfinite_both: int = 0  # the same NaN or infinity on both sides: left out of all measures
    elements: int = 0  # compared; 0 for a sketch
    where: WorstElement | None = None

    @property
    def size(self) -> float | None:
        """Relative L2, or infinity; None where nothing finite is left on either side."""
        return math.inf if self.infinite else self.relative_l2

    @property
    def measurable(self) -> bool:
        """Whether something finite can be compared, and no side alone has NaN or infinite elements."""
        return self.size is not None and not self.nonfinite

    @property
    def counted(self) -> str:
        """What `nonfinite` and `nonfinite_both` count."""
        return f"of {self.elements} elements" if self.elements else "prompts"


@dataclass
class ErrorSums:
    """Sums over the tensors of one site, batch by batch: first all by `add`, then all by `add_percent`."""

    elements: int = 0
    n: int = 0  # finite on both sides
    absolute: float = 0.0
    percent: float | None = None
    percent_notes: float = 0.0
    ulps: float = 0.0
    max_ulp: float = 0.0
    moments: Array = field(default_factory=lambda: np.zeros(5))  # sums of a, b, a^2, b^2, a b
    squares: float = 0.0  # of the differences
    nonfinite: int = 0
    worst: tuple[float, int, tuple[int, ...], float, float] = (-1.0, 0, (), 0.0, 0.0)  # error, prompt, index, a, b
    channels: Array | None = None  # largest |a| of each channel
    tokens: dict[tuple[int, int], float] = field(default_factory=dict)  # (prompt, token) -> relative L2

    def add(self, first: int, a: Array, b: Array, dtype: str) -> None:
        """Tensors [B, ..., T, C] of prompts first, first + 1, ... in float64."""
        usable, unlike = _usable(a, b), _unlike(a, b)
        a, b = np.where(usable, a, 0.0), np.where(usable, b, 0.0)
        error = np.abs(a - b)
        size = np.abs(a)
        in_ulps = error / spacing(a, dtype)
        self.elements += a.size
        self.n += int(usable.sum())
        self.nonfinite += int(unlike.sum())
        self.absolute += float(error.sum())
        self.percent_notes += float((error / (size + _NOTES_FLOOR)).sum())
        self.ulps += float(in_ulps.sum())
        self.max_ulp = max(self.max_ulp, float(in_ulps.max(initial=0.0)))
        self.moments += (a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum())
        self.squares += float((error * error).sum())
        self._place(first, a, b, error, unlike)
        largest = size.reshape(-1, size.shape[-1]).max(0)
        if self.channels is None or self.channels.shape != largest.shape:
            self.channels = largest
        self.channels = np.maximum(self.channels, largest)

    def add_percent(self, a: Array, b: Array) -> None:
        """The same tensors once more: the floor of MAPE is of the rms of all of them."""
        usable = _usable(a, b)
        a, b = np.where(usable, a, 0.0), np.where(usable, b, 0.0)
        floor = MAPE_FLOOR * math.sqrt(self.moments[2] / max(self.n, 1))
        found = float((np.abs(a - b) / np.maximum(np.abs(a), max(floor, 1e-300))).sum())
        self.percent = found + (self.percent or 0.0)

    def _place(self, first: int, a: Array, b: Array, error: Array, unlike: Mask) -> None:
        at = np.unravel_index(int(error.argmax()), error.shape)
        if error[at] > self.worst[0]:
            self.worst = (float(error[at]), first + int(at[0]), tuple(map(int, at[1:])), float(a[at]), float(b[at]))
        if a.ndim < 3:
            return
        others = (*range(1, a.ndim - 2), a.ndim - 1)  # all but the prompt and the token
        relative = np.sqrt((error * error).sum(others) / np.maximum((a * a).sum(others), 1e-300))  # [B, T]
        relative[unlike.any(others)] = math.inf
        for (row, token), value in np.ndenumerate(relative):
            self.tokens[(first + row, token)] = float(value)

    def measures(self) -> Measures:
        both = self.elements - self.n - self.nonfinite
        if self.nonfinite or not self.n:
            return Measures(
                infinite=self.nonfinite > 0, nonfinite=self.nonfinite, nonfinite_both=both, elements=self.elements
            )
        a, b, aa, bb, ab = self.moments
        n = self.n
        spread = math.sqrt(max(aa - a * a / n, 0.0) * max(bb - b * b / n, 0.0))
        size = relative_size(self.squares, aa)
        return Measures(
            relative_l2=size,
            infinite=size is None,
            cosine=_ratio(ab, math.sqrt(aa * bb)),
            mae=self.absolute / n,
            mape=None if self.percent is None else self.percent / n,
            mape_notes=self.percent_notes / n,
            pearson=_ratio(ab - a * b / n, spread),
            max_error=self.worst[0],
            mean_ulp=self.ulps / n,
            max_ulp=self.max_ulp,
            nonfinite_both=both,
            elements=self.elements,
            where=self._where(),
        )

    def _where(self) -> WorstElement | None:
        error, prompt, at, a, b = self.worst
        if error <= 0 or self.channels is None:
            return None
        channel = at[-1]
        outlier = self.channels[channel] > LIMITS["outlier_channel_ratio"] * float(np.median(self.channels))
        return WorstElement(prompt, at[-2] if len(at) > 1 else 0, channel, a, b, bool(outlier))


def from_sketches(a: Sketch, b: Sketch, numbers: int) -> Measures:
    """What the sketches of one site show; `numbers` of them are no padding.

    From M numbers the norm of the difference has the relative standard error 1 / sqrt(2 M); the norms are exact.
    """
    left, right = (np.concatenate([values, norms[:, None]], 1) for values, norms in (a, b))
    usable, unlike = _usable(left, right).all(-1), _unlike(left, right).any(-1)
    one_sided = int(unlike.sum())
    both = int((~usable).sum()) - one_sided
    if one_sided or not usable.any():
        return Measures(infinite=one_sided > 0, nonfinite=one_sided, nonfinite_both=both)
    left, right = left[usable], right[usable]
    squares = float(((left - right)[:, :-1] ** 2).sum())
    aa, bb = float((left[:, -1] ** 2).sum()), float((right[:, -1] ** 2).sum())
    size = relative_size(squares, aa)
    return Measures(
        relative_l2=size,
        infinite=size is None,
        cosine=_ratio((aa + bb - squares) / 2, math.sqrt(aa * bb)),
        gain=common_gain(a, b),
        relative_error=1 / math.sqrt(2 * numbers * usable.mean()),
        nonfinite_both=both,
    )


def common_gain(a: Sketch, b: Sketch) -> float | None:
    """The share by which b is larger than a in all its parts; 0 where that does not stand out from what is at random.

    None where the sketches have too few numbers for any gain to stand out.

    Each number t = s(b) / s(a) - 1 of the sketches sees other elements. Errors at random give a Cauchy distribution
    around 0 whose median has the standard error (pi / 2) median|t| / sqrt(n); a gain g moves all of them to g. The
    norms
    would be more sensitive, but a few massive elements dominate them: an error of one of them would pass for a gain.
    """
    usable = _usable(a[0], b[0]) & (a[0] != 0)
    count = int(usable.sum())
    if count < LEAST_FOR_GAIN:
        return None
    t = b[0][usable] / a[0][usable] - 1
    gain = float(np.median(t))
    by_chance = _GAIN_ERRORS * math.pi / 2 / math.sqrt(count)
    return gain if abs(gain) > max(_MOSTLY, by_chance) * float(np.median(np.abs(t))) else 0.0


def relative_size(difference: float, whole: float) -> float | None:
    """|d| / |a| from their squares; two zeros are alike, and anything is infinitely far from zero: None."""
    if difference == 0:
        return 0.0
    size = math.sqrt(difference / whole) if whole > 0 else math.inf
    return size if math.isfinite(size) else None


def spacing(values: Array, dtype: str) -> Array:
    """The distance of neighbouring numbers of a dtype at some values."""
    bits, least = _FORMATS.get(dtype, _FORMATS["float32"])
    exponent = np.frexp(values)[1] - 1  # 2^e <= |v| < 2^(e + 1)
    exponent = np.where(values == 0, least, np.maximum(exponent, least))
    found: Array = np.ldexp(1.0, exponent - bits + 1)
    return found


def _usable(a: Array, b: Array) -> Mask:
    return np.isfinite(a) & np.isfinite(b)


def _unlike(a: Array, b: Array) -> Mask:
    """Not finite on both sides, and not the same NaN or infinity either."""
    found: Mask = ~_usable(a, b) & (a != b) & ~(np.isnan(a) & np.isnan(b))
    return found


def _ratio(above: float, below: float) -> float | None:
    return float(min(1.0, max(-1.0, above / below))) if below > 0 else None
