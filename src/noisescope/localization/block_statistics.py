"""Measures what the local scans need at every block of a model, in a few forwards.

At the blocks of one forward (x is a block's input, y its output, d = y - x):

============  =================================================================================================
kurtosis      log(kurtosis of y / kurtosis of x), all elements together: limits cut it, spikes raise it
pile_up       outermost of 100 bins of y less the mean of the third and fourth, in standard errors; the larger side
mean_shift    median of d over 1.4826 MAD of d: a constant added to everything
gain          log(std of what 0.1 std(x) of noise on x does to y / std of that noise), by calling the block again
bookkeeping   elements of y that are not what the block's code makes of what its modules gave, bit for bit
instability   std of the difference of y in two runs of one batch, over std(y)
============  =================================================================================================

Every number compares a block with itself (its output with its own input), so the first and the last block are read like
any other. Instability, gain, kurtosis and pile-up are the published local scans; there, a layer's kurtosis is compared
with that of the layer before, its instability has an absolute limit, and a pile-up is a ratio above 2.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.audit_log import AuditLog
from noisescope.localization.data_flow import BlockFlow, flow_in_blocks
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.tensors import host_rows, on_host, same_numbers
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import without_cache
from noisescope.probe.watch import RecordedCall, watch

PROFILES = ("gain", "kurtosis", "pile_up", "mean_shift")  # numbers that can only be compared between layers
_NOISE = 0.1  # of std(x)
_BINS = 100
_FLOOR = 1e-12


@dataclass
class Readings:
    """All measured values, by scan and layer."""

    log: AuditLog  # of blocks whose output differs from what their code computes from their modules' outputs
    profiles: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {name: {} for name in PROFILES})
    instability: dict[int, float] = field(default_factory=dict)
    unstable: set[int] = field(default_factory=set)  # the same input, bit for bit, gave another output
    unknown: set[int] = field(default_factory=set)  # blocks whose code can't be run on the host
    nonfinite: set[int] = field(default_factory=set)  # blocks that made NaN or infinity of finite inputs
    elements: int = 0  # compared by bookkeeping
    forwards: float = 0.0


class Scanner:
    """Scans one model, one forward at a time."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, *, which: frozenset[str], seed: int) -> None:
        self.model = model
        self._whole = anatomy
        blocks = tuple(unit for unit in anatomy.units if unit.operators == ("residual",))
        self._anatomy = dataclasses.replace(anatomy, units=blocks)
        self.which = which
        self.results = Readings(AuditLog(anatomy, rows=0, seed=seed))
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # x and y [R, C] of the first run of a batch
        self._seen: set[int] = set()
        self._first = True
        self._again = False  # inside a block that is called once more

    def run(self, batch: dict[str, Any], *, repeated: bool = False) -> None:
        """Run one forward.

        A repeated forward is compared with the previous one and its profiles are not measured again.
        """
        self._first, self._seen = not repeated, set()

        def scan() -> None:
            with watch(self.model, self._on_block, lambda unit, operator: True, repeated=True, anatomy=self._anatomy):
                self.model(**without_cache(self.model), **batch)

        if "bookkeeping" in self.which:
            self._bookkeeping(flow_in_blocks(self.model, self._whole, scan))
        else:
            scan()
        self.results.forwards += 1 + (self._first and "gain" in self.which)  # the blocks are called once more

    def _bookkeeping(self, calls: list[BlockFlow]) -> None:
        """Run each block's code on the host, with its modules' recorded outputs."""
        for flow in calls:
            layer = int(flow.unit.place)
            self.results.elements += flow.output.numel()
            if flow.problem:
                self.results.unknown.add(layer)
            for difference in flow.differences[:1]:
                self.results.log.difference(difference, flow.unit.site("residual"))

    def _on_block(self, call: RecordedCall) -> None:
        layer, x, y = call.unit.place, call.first_input, call.output_tensor
        fresh = self._again or layer not in self._seen
        if not isinstance(layer, int) or x is None or y is None or x.shape != y.shape or not fresh:
            return
        self._seen.add(layer)
        if self._again:
            return
        with host_arithmetic():
            before, after = (host_rows(t).clone() for t in (x, y))
            if bool(before.isfinite().all()) and not bool(after.isfinite().all()):
                self.results.nonfinite.add(layer)
            if self._first:
                self._kept[layer] = (before, after)
                self._profiles(layer, _wide(before), _wide(after))
            else:
                self._compare(layer, before, after)
        if self._first and "gain" in self.which:
            self._gain(layer, call, x, y)

    def _profiles(self, layer: int, x: Tensor, y: Tensor) -> None:
        if "kurtosis" in self.which:
            self._note("kurtosis", layer, math.log(kurtosis(y) / kurtosis(x)))
        if "pile_up" in self.which:
            self._note("pile_up", layer, pile_up(y))
        if "mean_shift" in self.which:
            self._note("mean_shift", layer, mean_shift(x, y))

    def _note(self, scan: str, layer: int, value: float) -> None:
        self.results.profiles[scan].setdefault(layer, []).append(value)

    def _compare(self, layer: int, x: Tensor, y: Tensor) -> None:
        first_x, first_y = self._kept.get(layer, (x, x[:0]))
        if "instability" not in self.which or y.shape != first_y.shape:
            return
        difference = _wide(y) - _wide(first_y)
        size = float(difference.std()) / max(float(_wide(first_y).std()), _FLOOR)
        self.results.instability[layer] = max(size, self.results.instability.get(layer, 0.0))
        if same_numbers(x, first_x) and not same_numbers(y, first_y):
            self.results.unstable.add(layer)

    def _gain(self, layer: int, call: RecordedCall, x: Tensor, y: Tensor) -> None:
        with host_arithmetic():
            size = float(_wide(on_host(x)).std()) * _NOISE
            z = torch.randn(x.shape, generator=self._generator, device="cpu", dtype=torch.float32)
            noisy = x + (z * size).to(x.device, x.dtype)
        self._again = True
        try:
            again = call.again(noisy)
        except RuntimeError:  # a block that adds to a cache is given more keys than its mask has
            return
        finally:
            self._again = False
        with host_arithmetic():
            change, noise = (_wide(on_host(a)) - _wide(on_host(b)) for a, b in ((again, y), (noisy, x)))
            ratio = float(change.std()) / max(float(noise.std()), _FLOOR)
            self._note("gain", layer, math.log(max(ratio, _FLOOR)))


# -- formulas


def kurtosis(h: Tensor) -> float:
    """mean d^4 / (mean d^2)^2 over all elements: 3 for a normal distribution."""
    d = h.flatten() - h.mean()
    variance = float(d.square().mean())
    return float(d.pow(4).mean()) / variance**2 if variance > 0 else 1.0


def pile_up(h: Tensor) -> float:
    """Excess of a histogram's outermost bin over its third and fourth, in standard errors; the larger side counts."""
    flat = h.flatten()
    low, high = float(flat.min()), float(flat.max())
    if low == high:
        return 0.0
    counts = torch.histc(flat, _BINS, low, high)
    sides = [(float(counts[0]), float(counts[2:4].mean())), (float(counts[-1]), float(counts[-4:-2].mean()))]
    return max((edge - inner) / math.sqrt(max(1.5 * inner, 1.0)) for edge, inner in sides)  # counts are Poisson's


def mean_shift(x: Tensor, y: Tensor) -> float:
    """Median of y - x in units of its spread. Medians are used because a few massive channels dominate any mean."""
    d = (y - x).flatten()
    middle = d.median()
    spread = 1.4826 * float((d - middle).abs().median())
    return float(middle) / spread if spread > 0 else 0.0


def _wide(h: Tensor) -> Tensor:
    """As float64, with non-finite values removed: the bookkeeping scan handles those."""
    return h.double().nan_to_num(0.0, posinf=0.0, neginf=0.0)
