"""Per-sample scores as arrays: checked, paired, and averaged over seeds within each sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescope.errors import InvalidInput

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """Clean (x) and noisy (y) scores of the same samples, averaged over seeds, which depend on the sample.

    `counted` is right or wrong on the clean side, right or wrong (or averaged over seeds) on the noisy side.
    """

    x: Array
    y: Array
    counted: bool

    @classmethod
    def of(cls, clean: ArrayLike, noisy: ArrayLike) -> Paired:
        x, y = pairs(clean, noisy)
        return cls(x.mean(axis=1), y.mean(axis=1), is_binary(x) and bool(np.all((y >= 0) & (y <= 1))))

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def unchanged(self) -> bool:
        """Whether y - x is the same number in all samples, up to rounding."""
        return is_multiple(self.x, self.y)


def is_multiple(x: Array, y: Array, factor: float = 1.0) -> bool:
    """Whether y - factor x is the same number in all samples, up to rounding."""
    return float(np.ptp(y - factor * x)) <= 1e-12 * float(np.abs(x).max() + np.abs(y).max())


def unseen_error(clean: Array) -> float:
    """A standard error for n continuous pairs that all changed equally (mostly: not at all).

    Zero is no honest error after n samples. Two pseudo-pairs are added as Agresti and Min (2005) do for 0/1 pairs, half
    of one changed by plus and half by minus one standard deviation of the clean score: s / (n + 2).
    """
    scale = float(np.std(clean)) or float(abs(clean.mean()))
    return scale / (len(clean) + 2)


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
            f"{what}: {wrong} of {array.size} values are not finite. Score such a sample as a failure, or exclude "
            f"it on both sides; a mean over the rest would hide it"
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


def nonnegative_means(values: Array, what: str) -> Array:
    """The mean over seeds of each sample; no value may be below 0."""
    below = int(np.count_nonzero(values < 0))
    if below:
        raise InvalidInput(
            f"{what}: {below} of {values.size} values are below 0 (the lowest is {values.min():.3g}). A divergence "
            f"is at least 0: set round-off below 0 to 0 first, and use a difference for scores that can be negative"
        )
    means: Array = values.mean(axis=1)
    return means


def is_binary(values: Array) -> bool:
    return bool(np.all((values == 0) | (values == 1)))


def checked_level(level: float) -> float:
    if not 0 < level < 1:
        raise InvalidInput(f"level must be between 0 and 1, such as 0.95; got {level}")
    return float(level)
