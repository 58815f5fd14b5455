"""Until the branch with the real ones is merged."""

import numpy as np
from numpy.typing import ArrayLike

from noisescope.stats.continuous import ratio_limits
from noisescope.stats.estimate import Estimate


def degradation_ratio(clean: ArrayLike, noisy_a: ArrayLike, noisy_b: ArrayLike, level: float = 0.95) -> Estimate:
    x, a, b = (np.asarray(v, dtype=np.float64) for v in (clean, noisy_a, noisy_b))
    here, there = x - a, x - b
    if there.mean() <= 0:
        return Estimate(None, None, None, len(x))
    low, high = ratio_limits(there, here, level)
    ends = [float(e) if np.isfinite(e) else None for e in (low, high)]
    return Estimate(float(here.mean() / there.mean()), *ends, len(x))


def without_most_influential(x: ArrayLike, y: ArrayLike, *, method: str = "pearson") -> float | None:
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 4 or not np.ptp(a) or not np.ptp(b):
        return None
    whole = np.corrcoef(a, b)[0, 1]
    left = [
        np.corrcoef(np.delete(a, i), np.delete(b, i))[0, 1]
        for i in range(len(a))
        if np.ptp(np.delete(a, i)) and np.ptp(np.delete(b, i))
    ]
    return float(max(left, key=lambda r: abs(r - whole)))
