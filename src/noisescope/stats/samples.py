"""An estimate as a value, and the per-sample data it is made from."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescope.errors import InvalidInput
from noisescope.estimate import NOT_MEASURABLE as NOT_MEASURABLE
from noisescope.estimate import UNBOUNDED as UNBOUNDED
from noisescope.estimate import Estimate as Estimate

Array = NDArray[np.float64]


def scores(values: ArrayLike, what: str) -> Array:
    """Finite numbers as (samples, seeds); one number per sample becomes (samples, 1)."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(f"{what} must be numbers, one row per sample with the same seeds in each") from None
    if array.ndim == 1:
        array = array[:, np.newaxis]
    if array.ndim != 2 or array.size == 0:
        raise InvalidInput(f"{what} must have shape (samples,) or (samples, seeds) and not be empty; got {array.shape}")
    wrong = int(np.count_nonzero(~np.isfinite(array)))
    if wrong:
        raise InvalidInput(
            f"{what}: {wrong} of {array.size} values are not finite. Score such a sample as a failure, "
            "or leave it out on both sides; a mean over the rest would hide it"
        )
    return array


def pairs(clean: ArrayLike, noisy: ArrayLike, what: tuple[str, str] = ("clean", "noisy")) -> tuple[Array, Array]:
    """Both sides as (samples, seeds), the same samples in the same order."""
    x, y = scores(clean, what[0]), scores(noisy, what[1])
    if len(x) != len(y):
        raise InvalidInput(
            f"{what[0]} has {len(x)} samples and {what[1]} has {len(y)}: pairs need the same samples in the same order "
            "(rows are samples, columns are seeds)"
        )
    return x, y


def is_binary(values: Array) -> bool:
    return bool(np.all((values == 0) | (values == 1)))


def are_counted(x: Array, y: Array) -> bool:
    """Right or wrong on the clean side, right or wrong (or already averaged over seeds) on the other."""
    return is_binary(x) and bool(np.all((y >= 0) & (y <= 1)))


def nonnegative(values: Array, what: str) -> Array:
    """The values, if none is below 0."""
    below = int(np.count_nonzero(values < 0))
    if below:
        raise InvalidInput(
            f"{what}: {below} of {values.size} values are below 0 (the lowest is {values.min():.3g}). A divergence is "
            "at least 0; round-off below 0 should be set to 0 first, and scores that change sign have a difference"
        )
    return values


def checked_level(level: float) -> float:
    if not 0 < level < 1:
        raise InvalidInput(f"level must lie between 0 and 1, such as 0.95; got {level}")
    return float(level)
