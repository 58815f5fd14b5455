"""How far two tensors are apart: errors, their place, and what sketches can tell of them.

MAPE is mean |a - b| / max(|a|, rms(a) / 10), a the reference: elements near 0 would otherwise rule it (a 16-bit model
may show 22 % in a layer whose relative L2 error is 0.8 %). The original method notes' own formula, with |a| + 1e-8
below, stands beside it as `mape_notes`. An ulp is the spacing of the tensor's own dtype at the reference's value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisescope.findings import LIMITS

Array = NDArray[np.float64]

MAPE_FLOOR = 0.1  # of the reference's rms
_NOTES_FLOOR = 1e-8
_FORMATS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126), "float64": (53, -1022)}


@dataclass(frozen=True)
class Where:
    """An element: prompt, token, channel (the last dimension), and what either side has there."""

    prompt: int
    token: int
    channel: int
    a: float
    b: float
    outlier_channel: bool  # the reference's channel is larger than 10 x the median channel

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Measures:
    """Of one site; None where a sketch can't tell. `relative_error` is the standard error of an estimate."""

    relative_l2: float
    cosine: float | None
    relative_error: float = 0.0
    mae: float | None = None
    mape: float | None = None
    mape_notes: float | None = None
    pearson: float | None = None
    max_error: float | None = None
    mean_ulp: float | None = None
    max_ulp: float | None = None
    nonfinite: int = 0  # elements that are NaN or infinite on one side only
    elements: int = 0  # looked at; 0 for a sketch
    where: Where | None = None

    def to_dict(self) -> dict[str, Any]:
        plain = {**vars(self), "where": None if self.where is None else self.where.to_dict()}
        if not math.isfinite(self.relative_l2):
            plain["relative_l2"] = None
        return plain


@dataclass
class Sums:
    """Sums over the tensors of one site, prompt by prompt."""

    n: int = 0
    absolute: float = 0.0
    percent: float = 0.0
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
        usable = np.isfinite(a) & np.isfinite(b)
        self.nonfinite += int((np.isfinite(a) != np.isfinite(b)).sum())
        a, b = np.where(usable, a, 0.0), np.where(usable, b, 0.0)
        error = np.abs(a - b)
        size = np.abs(a)
        rms = math.sqrt(float(np.mean(a * a)))
        in_ulps = error / spacing(a, dtype)
        self.n += a.size
        self.absolute += float(error.sum())
        self.percent += float((error / np.maximum(size, max(MAPE_FLOOR * rms, 1e-300))).sum())
        self.percent_notes += float((error / (size + _NOTES_FLOOR)).sum())
        self.ulps += float(in_ulps.sum())
        self.max_ulp = max(self.max_ulp, float(in_ulps.max(initial=0.0)))
        self.moments += (a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum())
        self.squares += float((error * error).sum())
        self._place(first, a, b, error)
        largest = size.reshape(-1, size.shape[-1]).max(0)
        if self.channels is None or self.channels.shape != largest.shape:
            self.channels = largest
        self.channels = np.maximum(self.channels, largest)

    def _place(self, first: int, a: Array, b: Array, error: Array) -> None:
        at = np.unravel_index(int(error.argmax()), error.shape)
        if error[at] > self.worst[0]:
            self.worst = (float(error[at]), first + int(at[0]), tuple(map(int, at[1:])), float(a[at]), float(b[at]))
        if a.ndim < 3:
            return
        others = (*range(1, a.ndim - 2), a.ndim - 1)  # all but the prompt and the token
        relative = np.sqrt((error * error).sum(others) / np.maximum((a * a).sum(others), 1e-300))  # [B, T]
        for (row, token), value in np.ndenumerate(relative):
            self.tokens[(first + row, token)] = float(value)

    def measures(self) -> Measures:
        a, b, aa, bb, ab = self.moments
        n = max(self.n, 1)
        spread = math.sqrt(max(aa - a * a / n, 0.0) * max(bb - b * b / n, 0.0))
        relative = math.inf if self.nonfinite else relative_size(self.squares, aa)
        return Measures(
            relative_l2=relative,
            cosine=_ratio(ab, math.sqrt(aa * bb)),
            mae=self.absolute / n,
            mape=self.percent / n,
            mape_notes=self.percent_notes / n,
            pearson=_ratio(ab - a * b / n, spread),
            max_error=self.worst[0],
            mean_ulp=self.ulps / n,
            max_ulp=self.max_ulp,
            nonfinite=self.nonfinite,
            elements=self.n,
            where=self._where(),
        )

    def _where(self) -> Where | None:
        error, prompt, at, a, b = self.worst
        if error <= 0 or self.channels is None:
            return None
        channel = at[-1]
        outlier = self.channels[channel] > LIMITS["outlier_channel_ratio"] * float(np.median(self.channels))
        return Where(prompt, at[-2] if len(at) > 1 else 0, channel, a, b, bool(outlier))


def from_sketches(a: Array, b: Array, numbers: int) -> Measures:
    """What the sketches [prompts, m] of one site tell; `numbers` of them are no filling."""
    finite = np.isfinite(a) & np.isfinite(b)
    one_sided = int((np.isfinite(a) != np.isfinite(b)).any(-1).sum())
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    aa, bb, ab = float((a * a).sum()), float((b * b).sum()), float((a * b).sum())
    relative = math.inf if one_sided else relative_size(float(((a - b) ** 2).sum()), aa)
    error = 1 / math.sqrt(2 * max(numbers, 1))
    return Measures(relative, _ratio(ab, math.sqrt(aa * bb)), relative_error=error, nonfinite=one_sided)


def relative_size(difference: float, whole: float) -> float:
    """|d| / |a| from their squares; two zeros are alike, and anything is infinitely far from zero."""
    if difference == 0:
        return 0.0
    return math.sqrt(difference / whole) if whole > 0 else math.inf


def spacing(values: Array, dtype: str) -> Array:
    """The distance of neighbouring numbers of a dtype at some values."""
    bits, least = _FORMATS.get(dtype, _FORMATS["float32"])
    exponent = np.frexp(values)[1] - 1  # 2^e <= |v| < 2^(e + 1)
    exponent = np.where(values == 0, least, np.maximum(exponent, least))
    found: Array = np.ldexp(1.0, exponent - bits + 1)
    return found


def _ratio(above: float, below: float) -> float | None:
    return float(min(1.0, max(-1.0, above / below))) if below > 0 else None
