"""A number with its interval: a value, so that reports can be read without numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from noisescope.errors import InvalidInput

NOT_MEASURABLE = "not measurable"
UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Estimate:
    """A number with its interval. n counts samples, never samples x seeds.

    None stands for what JSON can't express: a value that is not measurable or has no bound (see `note`), an end of
    the interval that lies at infinity, or no interval at all (one sample). `method` names how the interval was made.

    >>> loss = Estimate(0.2, 0.1, 0.25, 100)
    >>> loss.above(0.05), loss.above(0.15), loss.below(0.3)
    (True, False, True)
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    level: float = 0.95
    note: str = ""
    method: str = ""

    def __post_init__(self) -> None:
        if self.n < 0 or not 0 < self.level < 1:
            raise InvalidInput(
                f"an estimate needs n samples and a level between 0 and 1; got {self.n} and {self.level}"
            )
        if self.low is not None and self.high is not None and self.low > self.high + 1e-9 * abs(self.high):
            raise InvalidInput(f"an interval must go from low to high; got {self.low} to {self.high}")

    @property
    def bounded(self) -> bool:
        """Both ends of the interval are known."""
        return self.low is not None and self.high is not None

    @property
    def one_sided(self) -> bool:
        """Exactly one end of the interval is known."""
        return (self.low is None) != (self.high is None)

    def above(self, limit: float) -> bool:
        """The whole interval lies above the limit."""
        return self.low is not None and self.low > limit

    def below(self, limit: float) -> bool:
        """The whole interval lies below the limit."""
        return self.high is not None and self.high < limit

    def within(self, least: float, most: float) -> Estimate:
        """The same with ends cut to what the quantity can be at all: a share has none below 0 or above 1."""
        low, high = (None if end is None else min(max(end, least), most) for end in (self.low, self.high))
        return replace(self, low=low, high=high)

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        value, low, high = (None if end is None else end * factor for end in (self.value, self.low, self.high))
        return replace(self, value=value, low=low, high=high)
