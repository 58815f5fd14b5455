"""Candidates for `fingerprint`: faults of chosen families and sizes, simulated layer by layer on a good system."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from noisescope.anatomy import Anatomy
from noisescope.errors import InvalidInput, unknown
from noisescope.faults import FAMILIES, Fault, faulty
from noisescope.injection import Injection
from noisescope.locators.prompts import Prompts, last_logits
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.probe.prefix import Prefix

Array = NDArray[np.float64]

NOTES_NOISE = "relative_gaussian"  # the published fault: relative noise on the products of one layer
DRAWN = ("noise", "spike", "non_determinism", "bit_flip", NOTES_NOISE)  # what draws; others are functions of the data
_MAGNITUDES = (0.3, 0.1, 0.05, 0.01)
_SIZES: dict[str, tuple[float, ...]] = dict.fromkeys(("dead_zone", "saturation", "bias", "noise", "spike"), _MAGNITUDES)
_SIZES |= {"non_determinism": (5.0, 1.01), NOTES_NOISE: (0.2, 0.05)}
_ONE_SIZE = {"noise": 0.1, "spike": 0.1, "non_determinism": 5.0, NOTES_NOISE: 0.05}  # blind: directions hardly change
_DEFAULT = {
    "blind": ("dead_zone", "saturation", "bias", "noise", "spike"),  # non_determinism is noise to the logits
    "same-seed": ("dead_zone", "saturation", "bias", "noise", "spike", "non_determinism", NOTES_NOISE),
}
_BLIND_SEED = 1_000_003  # plus the caller's: not the seed of any simulated failure
_ROUNDING = 2.0  # eps of noise on every operator: what a healthy device may differ by
_SKETCH = 1024  # numbers that are kept of a fingerprint


@dataclass(frozen=True)
class Setting:
    """A fault of one size, to be put into each layer."""

    family: str
    size: float | None
    fault: Fault | Gaussian
    seed: int

    @property
    def drawn(self) -> bool:
        return self.family in DRAWN

    @property
    def words(self) -> str:
        return self.family if self.size is None else f"{self.family} {self.size:g}"

    def resized(self, factor: float) -> Setting | None:
        """The same with another size; None where its family does not allow that size."""
        assert self.size is not None and isinstance(self.fault, Fault)
        size = self.size * factor
        try:
            return dataclasses.replace(self, size=size, fault=self.fault.resized(size))
        except InvalidInput:
            return None


def settings(
    mode: str, families: Iterable[str] | None, sizes: Sequence[float] | Mapping[str, Sequence[float]] | None, seed: int
) -> Iterator[Setting]:
    """The faults to be tried in each layer."""
    own = seed if mode == "same-seed" else _BLIND_SEED + seed
    for family in _DEFAULT[mode] if families is None else families:
        if family != NOTES_NOISE and not (family in FAMILIES and FAMILIES[family].at_block_output):
            allowed = [name for name, kind in FAMILIES.items() if kind.at_block_output]
            raise unknown("fault family at a block's output", family, [*allowed, NOTES_NOISE])
        given = sizes.get(family) if isinstance(sizes, Mapping) else sizes
        for size in _sizes(mode, family) if given is None else given:
            if family == NOTES_NOISE:
                assert size is not None
                yield Setting(family, size, Gaussian(size), own)
                continue
            fault = dataclasses.replace(FAMILIES[family].make(), seed=own)
            yield Setting(family, size, fault if size is None else fault.resized(size), own)


def _sizes(mode: str, family: str) -> tuple[float | None, ...]:
    """The sizes of a family where none are given: the notes' for theirs, else the family's own default."""
    if mode == "blind" and family in _ONE_SIZE:
        return (_ONE_SIZE[family],)
    if family in _SIZES:
        return _SIZES[family]
    return (FAMILIES[family].default,)


class Bench:
    """A good system on which faults are simulated; blocks before a fault are computed once.

    with Bench(model, anatomy, batches_of(record), draws=8) as bench:
        bench.clean, bench.faulty_logits(10, setting)

    Prompts share forwards as they did on the suspect device: sizes such as max |h| and the numbers that a fault draws
    are those of a whole batch.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, batches: Sequence[Prompts], *, draws: int) -> None:
        if draws < 2:
            raise InvalidInput(f"draws must be at least 2, got {draws}")
        self.model, self.anatomy, self.batches, self.draws = model, anatomy, tuple(batches), draws
        self.forwards = 0.0  # of all prompts once
        self.clean: Array = np.zeros(0)
        self._prefix = Prefix(model, anatomy)
        self._kept: set[int] = set()  # draws of which the blocks' clean outputs are kept

    def __enter__(self) -> Bench:
        self._prefix.__enter__()
        try:
            self.clean = self._without_fault(1)[0]
        except BaseException:
            self._prefix.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._prefix.__exit__(None, None, None)

    def faulty_logits(self, layer: int, setting: Setting, *, draws: int = 1) -> Array:
        """[draws, P, V]"""
        if draws not in self._kept:
            self._without_fault(draws)
        start = layer if self._prefix.usable((0, draws)) else 0
        with self._broken(layer, setting):
            return self._run(draws, lambda batch: self._prefix.starting_at(start, batch), start)

    def floor(self) -> float:
        """The rms of what rounding alone does to the logits: every operator's output off by some eps."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        noise = Injection(Gaussian(_ROUNDING * torch.finfo(dtype).eps), phases=frozenset({"forward"}))
        with inject(self.model, noise, anatomy=self.anatomy):
            logits = self._run(1, lambda batch: self._prefix.starting_at(0, batch))
        return float(np.sqrt(np.square(logits[0] - self.clean).mean()))

    def _without_fault(self, draws: int) -> Array:
        self._kept.add(draws)
        return self._run(draws, self._prefix.recording)

    def _run(self, draws: int, scope: Callable[[Hashable], AbstractContextManager[None]], start: int = 0) -> Array:
        """[draws, P, V]; the forwards of each batch inside `scope(its name)`."""
        found: list[Array] = []
        for number, prompts in enumerate(self.batches):
            with scope((number, draws)):
                logits, _ = last_logits(self.model, prompts * draws)
            found.append(logits.double().numpy().reshape(draws, len(prompts), -1))
        self.forwards += draws * (1 - start / len(self.anatomy.blocks))
        return np.concatenate(found, axis=1)

    def _broken(self, layer: int, setting: Setting) -> AbstractContextManager[Any]:
        if isinstance(setting.fault, Fault):
            return faulty(self.model, setting.fault, layer, anatomy=self.anatomy)
        noise = Injection(
            setting.fault,
            operators=frozenset({"gemm"}),
            layers=frozenset({layer}),
            phases=frozenset({"forward"}),
            seed=setting.seed,
        )
        return inject(self.model, noise, anatomy=self.anatomy)


def sketch(fingerprints: Array) -> Array:
    """[..., V] -> [..., at most 1024]: vocabulary entries added up with random signs, so that products stay right.

    (A count sketch: Charikar, Chen, Farach-Colton 2002. The signs and places are the same in every run.)
    """
    width = fingerprints.shape[-1]
    if width <= _SKETCH:
        return fingerprints
    generator = np.random.default_rng(0)
    place, sign = generator.integers(0, _SKETCH, width), generator.choice([-1.0, 1.0], width)
    order, counts = np.argsort(place, kind="stable"), np.bincount(place, minlength=_SKETCH)
    starts = np.cumsum(counts) - counts  # of each place, once sorted
    padded = np.concatenate([(fingerprints * sign)[..., order], np.zeros((*fingerprints.shape[:-1], 1))], -1)
    sums: Array = np.add.reduceat(padded, starts, axis=-1) * (counts > 0)  # (one element where there are none)
    return sums
