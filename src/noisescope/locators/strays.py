"""Where NaN and infinity come from: the first output of a forward that holds any, and what the host makes of it.

All outputs before it were finite. So an operator that was given finite numbers made them itself; where it was not, what
lies before it did (a sum, the product of gate and up, a cache), and its input is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noisescope.locators.floors import number_format
from noisescope.locators.products import Recomputed
from noisescope.sites import Site


@dataclass(frozen=True)
class Origin:
    """The first place where NaN or infinity is seen."""

    site: Site
    dtype: str
    largest: float  # number of that dtype
    operand: int = 0  # which one, of an operator's inputs
    why: str = ""  # what the host found; empty where only the way its block is made can tell
    fault: bool = False  # nothing that was given could have led there

    def because(self, why: str, *, fault: bool = False) -> Origin:
        return dataclasses.replace(self, why=why, fault=fault)

    @property
    def overflow(self) -> str:
        return f"an overflow of {self.dtype}, whose largest number is {self.largest:.5g}, and no fault"


class Strays:
    """Watches the outputs of one audit's forwards."""

    def __init__(self) -> None:
        self.origin: Origin | None = None
        self._seen = False  # in this forward

    def next_pass(self) -> None:
        self._seen = False

    def arise(self, site: Site, given: Iterable[Tensor], y: object) -> bool:
        """Whether a call's output is where they arise: then it is to be explained."""
        if self._seen or not isinstance(y, Tensor) or _all_finite(y):
            return False
        self._seen = True
        if self.origin is not None:
            return False
        before = next((at for at, x in enumerate(given) if not _all_finite(x)), None)
        made_here = before is None
        site = site if made_here else dataclasses.replace(site, tensor="input")
        dtype, largest = str(y.dtype).removeprefix("torch."), number_format(y.dtype).largest
        self.origin = Origin(site, dtype, largest, before or 0)
        return made_here

    def explain(self, recomputed: Recomputed) -> None:
        """By what the host computes from the same inputs. Where that fits the dtype, it is the judge's alarm."""
        assert self.origin is not None
        values = recomputed.reference.values[~recomputed.y.isfinite()]
        if not len(values):
            self.origin = self.origin.because("not in the rows that the host computed again: give more rows=")
        elif bool(values.isfinite().all()):
            size = float(values.abs().max())
            self.origin = self.origin.because(f"the host's own result reaches {size:.4g}: {self.origin.overflow}")
        else:
            self.origin = self.origin.because("nor is the host's result finite: its weights are not, or it has none")

    def explain_sum(self, terms: Iterable[Tensor]) -> None:
        """A sum of some of these, which are finite: can any be too large for the dtype?"""
        assert self.origin is not None
        sizes = [term.double().abs() for term in terms]
        most = float(torch.stack(sizes).sum(0).max()) if sizes else torch.inf
        if most < self.origin.largest:
            self.origin = self.origin.because(f"no sum of what its modules gave exceeds {most:.4g}", fault=True)


def _all_finite(x: Tensor) -> bool:
    """Of plain tensors; packed ones and those of eight bits can't be asked."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.dtype.itemsize > 1
    return not plain or bool(torch.isfinite(x).all())
