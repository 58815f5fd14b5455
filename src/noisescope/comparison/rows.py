"""The rows of a comparison of two records. Field names are the keys of its JSON form (jsonform.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from noisescope.comparison.measures import Measures
from noisescope.comparison.records import RecordedSite
from noisescope.findings import LIMITS, band
from noisescope.sites import Place, Site


@dataclass(frozen=True)
class HardwareBands:
    """Bands of the original method notes; "not measurable" where a figure is not known."""

    mae: str
    mape: str
    pearson: str


@dataclass(frozen=True, kw_only=True)
class SiteRow(RecordedSite, Measures):
    """One site on both sides.

    `expected` is the relative L2 of its inputs by earlier sites, or one operator's round-off where that is larger;
    `expected_gain` the same of the gain's size. A difference below `smallest_detectable`, or a gain below
    `smallest_detectable_gain` (None: no gain can be seen here), would not have been called a divergence.
    """

    expected: float
    expected_gain: float
    smallest_detectable: float
    smallest_detectable_gain: float | None
    diverges: bool
    critical: bool  # one side alone has NaN or infinite elements
    bands: HardwareBands
    detail: Literal["full", "sketch"]

    @property
    def decided(self) -> bool:
        """Whether this row decides something: some element is finite, or only one side has none."""
        return self.size is not None

    @property
    def too_far(self) -> bool:
        return (self.size or 0.0) > self.smallest_detectable

    @property
    def too_large(self) -> bool:
        """Or too small: by a gain, which random errors don't produce however large they are."""
        return self.smallest_detectable_gain is not None and abs(self.gain or 0.0) > self.smallest_detectable_gain


def site_row(site: Site, found: Measures, *, expected: float, expected_gain: float) -> SiteRow:
    """The measures of a site, compared with the error of its inputs."""
    factor = LIMITS["divergence_factor"]
    row = SiteRow(
        **vars(found),
        operator=site.operator,
        place=site.place,
        module=site.module,
        component=site.component,
        occurrence=site.occurrence,
        expected=expected,
        expected_gain=expected_gain,
        smallest_detectable=factor * expected,
        smallest_detectable_gain=None if found.gain is None else factor * expected_gain,
        diverges=False,
        critical=found.nonfinite > 0,
        bands=HardwareBands(band("mae", found.mae), band("mape", found.mape), band("pearson", found.pearson)),
        detail="full" if found.elements else "sketch",
    )
    return replace(row, diverges=row.too_far or row.too_large)


@dataclass(frozen=True)
class BlockError:
    """The error that has accumulated in a block's output, and its factor over the block before."""

    layer: Place
    relative_l2: float | None
    growth: float | None


@dataclass(frozen=True)
class Logits:
    """KL(a || b) of the next token in nats, and how often the likeliest token is the same; of n prompts.

    `nonfinite` more prompts have NaN or infinite logits on some side.
    """

    kl: float | None
    worst_kl: float | None
    agreement: float | None
    max_error: float | None
    n: int
    nonfinite: int


@dataclass(frozen=True)
class TokenRow:
    """A token that differs. `relative_l2` needs whole tensors; from sketches only `score`, which ranks, is known."""

    prompt: int
    token: int
    id: int | None
    relative_l2: float | None
    score: float | None
    nonfinite: bool  # one side alone has NaN or infinite elements here


@dataclass(frozen=True)
class Side:
    """Where one record comes from."""

    path: str
    architecture: str
    dtype: str
    prompts: int
    device: str
    versions: Mapping[str, str]
    detail: str
    created: str


@dataclass(frozen=True)
class Sides:
    a: Side
    b: Side
