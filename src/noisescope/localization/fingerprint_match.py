"""Candidate faults for `fingerprint`, simulated layer by layer on a good system, and which of them fits a failure.

Fingerprints of faults that are functions of the data are compared by their cosine. Faults that draw have none of their
own, only a distribution: a block's error reaches the logits through the blocks behind it, and the covariance C of what
arrives depends on the layer and not on the seed. Draws of each candidate give C, and the failure's fingerprints d are
scored by the angular central Gaussian, in which the size of each d, and so that of the fault, drops out (Tyler 1987):

    log p(d) = -1/2 log det C - r/2 log(d' C^-1 d),    d in the r leading directions of all draws

Something is always the best fit. What a misfit reaches is known from the candidates themselves, each of which is a
misfit for the others: the cosines of different families, and of candidates in different layers. (Demo, float32, before
sizes are refined: 1 of 175 faults of other families and operators is beyond both, and so are 79 of 94 that are among
the candidates up to their size; 79 of the 79 name the right layer.)
"""

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

from noisescope.errors import InvalidInput, unknown
from noisescope.faults import FAMILIES, Fault, faulty
from noisescope.injection import Injection
from noisescope.localization.prompts import last_logits
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import Prompts
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.probe.prefix import Prefix

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

NOTES_NOISE = "relative_gaussian"  # the published fault: relative noise on the products of one layer
DRAWN = ("noise", "spike", "non_determinism", "bit_flip", NOTES_NOISE)  # what draws; others are functions of the data
_MAGNITUDES = (0.3, 0.1, 0.05, 0.01)
_SIZES: dict[str, tuple[float, ...]] = dict.fromkeys(("dead_zone", "saturation", "bias", "noise", "spike"), _MAGNITUDES)
_SIZES |= {"non_determinism": (5.0, 1.01), NOTES_NOISE: (0.2, 0.05)}
_ONE_SIZE = {"noise": 0.1, "spike": 0.1, "non_determinism": 5.0, NOTES_NOISE: 0.05}  # blind: directions hardly change
_DEFAULT = {
    # Not non_determinism, which is noise to the logits.
    "blind": ("dead_zone", "saturation", "bias", "noise", "spike", NOTES_NOISE),
    "same-seed": ("dead_zone", "saturation", "bias", "noise", "spike", "non_determinism", NOTES_NOISE),
}
_BLIND_SEED = 1_000_003  # plus the caller's: not the seed of any simulated failure
_ROUNDING = 2.0  # eps of noise on every operator: what a healthy device may differ by
_SKETCH = 1024  # numbers that are kept of a fingerprint
_RANK = 64
_SHRINK = 0.05  # of a covariance towards a multiple of 1
# Of log-likelihoods, since the numbers in a fingerprint are not independent. Draws of the candidates themselves, held
# out one after the other, are given their own layer the largest mean log-probability at 6 (-0.81; -0.84 at 4, -0.95 at
# 12), where the likeliest layer has 0.66 on average and is right in 0.70 (demo, float32, n = 510; bfloat16 the same).
_TEMPERATURE = 6.0
_DISTINCT = 0.5  # of the probability that a layer with its neighbours must hold: more likely there than elsewhere
_TWICE = 2.0  # as likely as the next layer, or both fit equally well and neither is named


@dataclass(frozen=True)
class Setting:
    """A fault of one size, to inject into each layer."""

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
        """The same fault with another size; None if its family does not allow that size."""
        assert self.size is not None and isinstance(self.fault, Fault)
        size = self.size * factor
        try:
            return dataclasses.replace(self, size=size, fault=self.fault.resized(size))
        except InvalidInput:
            return None


def settings(
    mode: str, families: Iterable[str] | None, sizes: Sequence[float] | Mapping[str, Sequence[float]] | None, seed: int
) -> Iterator[Setting]:
    """The faults to try in each layer."""
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
    """The default sizes of a family: those of the method notes if given there, else the family's own default."""
    if mode == "blind" and family in _ONE_SIZE:
        return (_ONE_SIZE[family],)
    if family in _SIZES:
        return _SIZES[family]
    return (FAMILIES[family].default,)


class TrialRunner:
    """A good system on which faults are simulated; blocks before a fault are computed once.

    with TrialRunner(model, anatomy, batches_of(record), draws=8) as runner:
        runner.clean, runner.faulty_logits(10, setting)

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

    def __enter__(self) -> TrialRunner:
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
        """The rms effect of rounding alone on the logits: every operator's output is perturbed by a few eps."""
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
    """[..., V] -> [..., at most 1024]: vocabulary entries summed with random signs, which preserves inner products.

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
    return np.asarray(np.add.reduceat(padded, starts, axis=-1) * (counts > 0))  # (one element where there are none)


# -- matching


@dataclass(frozen=True)
class Candidate:
    """A setting in one layer: its fingerprints, and how well it fits the failure."""

    layer: int
    setting: Setting
    cosine: float  # mean over prompts; of the first draw
    identical: bool  # the same logits as the failure's, bit for bit
    sketches: Array  # [draws, P, S]


@dataclass(frozen=True)
class Fit:
    """The best candidate of one layer, and its score among the layers."""

    candidate: Candidate
    score: float
    confidence: float
    how: str


@dataclass(frozen=True)
class Match:
    """How well a fault in each layer explains the failure, whether any does, and how that is known."""

    fits: Mapping[int, Fit]
    fitting: bool
    note: str
    alike: tuple[int, ...] = ()  # layers that explain the failure about as well as each other


def cosines(a: Array, b: Array, floor: float) -> Array:
    """Mean over prompts of the cosine of a [..., P, V] and b [..., P, V], broadcast.

    A prompt that neither changes (rms within `floor`) says nothing, one that only one of them changes counts as 0.
    """
    products, sizes = (a * b).sum(-1), [np.sqrt(np.square(t).sum(-1)) for t in (a, b)]
    limit = floor * np.sqrt(a.shape[-1])
    both, either = (sizes[0] > limit) & (sizes[1] > limit), (sizes[0] > limit) | (sizes[1] > limit)
    values = np.where(both, products / np.maximum(sizes[0] * sizes[1], 1e-300), 0.0)
    return np.asarray(values.sum(-1) / np.maximum(either.sum(-1), 1))


def same_seed(candidates: Sequence[Candidate], changed: Mask) -> Match:
    """By cosine; a candidate fits if it equals the failure, or is closer to it than any two in different layers."""
    best = best_by_cosine(candidates)
    top = max(best.values(), key=lambda c: (c.identical, c.cosine))
    fits = {
        layer: Fit(c, c.cosine, 1.0 if c.identical else max(0.0, c.cosine), "mean cosine") for layer, c in best.items()
    }
    known = "identity test: candidates have the failure's seed and noise model, which no real device reveals"
    if top.identical:
        return Match(fits, True, known)
    reach = _reach(candidates, candidates, changed, "layer")
    other = "no candidate reproduces the failure bit for bit: the seed, family, size or kind of device differs"
    return Match(fits, top.cosine > reach, f"{known}; {other} (best cosine {top.cosine:.3f}, wrong layers {reach:.3f})")


def blind(observed: Array, candidates: Sequence[Candidate], changed: Mask) -> Match:
    """Match by cosine if that exceeds what mismatches reach, else by covariance; `observed` is [P changed, S]."""
    direct = [c for c in candidates if not c.setting.drawn]
    drawn = [c for c in candidates if c.setting.drawn]
    best = best_by_cosine(direct)
    top = max(best.values(), key=lambda c: c.cosine, default=None)
    cosine = -1.0 if top is None else top.cosine
    by_chance = chance(candidates, changed)
    if top is not None and (cosine > by_chance or not drawn):
        reach = max(_reach(direct, direct, changed, "family"), _reach([top], direct, changed, "layer"))
        fits = {layer: Fit(c, c.cosine, _confidence(c, best), "mean cosine") for layer, c in best.items()}
        note = f"best cosine {cosine:.3f}; random faults reach {by_chance:.3f}, other families and layers {reach:.3f}"
        return Match(fits, cosine > reach, f"matched by cosine: {note}")
    fits = _by_covariance(observed, drawn)
    share = _with_neighbours(fits)
    common, usual = coherence(observed), max(coherence(draw) for c in drawn for draw in c.sketches[:, changed])
    note = (
        f"no deterministic fault fits (best cosine {cosine:.3f}, {by_chance:.3f} by chance): matched by the "
        f"covariance of random faults, which separates neighbouring layers poorly; the likeliest layer and its "
        f"neighbours have {share:.2f} of the probability; prompts have {common:.1f} in common, random faults up to "
        f"{usual:.1f}"
    )
    near = share > _DISTINCT and common <= usual
    alike = _alike(fits) if near else ()
    if alike:
        note = f"layers {', '.join(map(str, alike))} fit equally well, so none of them is named; {note}"
    return Match(fits, near and not alike, note, alike)


def _alike(fits: Mapping[int, Fit]) -> tuple[int, ...]:
    """The layers that are at least half as likely as the likeliest, if there are any."""
    top = max(fit.score for fit in fits.values())
    found = tuple(sorted(layer for layer, fit in fits.items() if _TWICE * fit.score > top))
    return found if len(found) > 1 else ()


def best_by_cosine(candidates: Sequence[Candidate]) -> dict[int, Candidate]:
    """The candidate with the largest cosine in each layer."""
    return {c.layer: c for c in sorted(candidates, key=lambda candidate: (candidate.identical, candidate.cosine))}


def chance(candidates: Sequence[Candidate], changed: Mask) -> float:
    """The largest cosine of any random with any deterministic fingerprint, over prompts that the failure changed."""
    direct, drawn = ([c for c in candidates if c.setting.drawn == kind] for kind in (False, True))
    if not direct or not drawn:
        return 0.0
    draws = np.concatenate([c.sketches[:, changed] for c in drawn])
    return float(_similarities(_first_draws(direct, changed), draws).max())


def coherence(fingerprints: Array) -> float:
    """P |mean of unit fingerprints|^2 of [P, S]: about 1 where each prompt's is a draw of its own, P where all agree.

    A fault that is a function of the data pushes prompts the same way, whatever its family.
    """
    rows = unit(_changed(fingerprints))
    return float(len(rows) * np.square(rows.mean(0)).sum()) if len(rows) else 0.0


def _reach(ones: Sequence[Candidate], others: Sequence[Candidate], changed: Mask, kind: str) -> float:
    """The largest cosine of `ones` with `others` of another kind ("family" or "layer"): what a mismatch can reach."""

    def of(candidate: Candidate) -> str | int:
        return candidate.layer if kind == "layer" else candidate.setting.family

    unlike = np.array([[of(a) != of(b) for b in others] for a in ones])
    found = _similarities(_first_draws(ones, changed), _first_draws(others, changed))[unlike]
    return float(found.max(initial=-1.0))


def _first_draws(candidates: Sequence[Candidate], changed: Mask) -> Array:
    return np.stack([c.sketches[0][changed] for c in candidates])


def _similarities(a: Array, b: Array) -> Array:
    """[A, P, S], [B, P, S] -> [A, B]: mean cosines over prompts."""
    return np.asarray(unit(a).reshape(len(a), -1) @ unit(b).reshape(len(b), -1).T / a.shape[1])


def _confidence(candidate: Candidate, best: Mapping[int, Candidate]) -> float:
    """Near 1 for a layer that alone fits; shared between layers that fit equally well."""
    shares = {layer: max(1 - c.cosine, 1e-6) ** -2 for layer, c in best.items()}
    top = max(c.cosine for c in best.values())
    return max(0.0, top) * shares[candidate.layer] / sum(shares.values())


def _by_covariance(observed: Array, drawn: Sequence[Candidate]) -> dict[int, Fit]:
    likelihood = _log_likelihoods(observed, drawn)
    weight = np.exp((likelihood - likelihood.max()) / _TEMPERATURE)
    posterior: dict[int, float] = {}
    for candidate, share in zip(drawn, weight / weight.sum(), strict=True):
        posterior[candidate.layer] = posterior.get(candidate.layer, 0.0) + float(share)
    most = {c.layer: c for c, _ in sorted(zip(drawn, likelihood, strict=True), key=lambda pair: float(pair[1]))}
    return {layer: Fit(c, posterior[layer], posterior[layer], "covariance of draws") for layer, c in most.items()}


def _with_neighbours(fits: Mapping[int, Fit]) -> float:
    """The total probability of the likeliest layer and its two neighbours."""
    top = max(fits, key=lambda layer: fits[layer].score)
    return sum(fit.score for layer, fit in fits.items() if abs(layer - top) <= 1)


def _log_likelihoods(observed: Array, drawn: Sequence[Candidate]) -> Array:
    """Log-likelihood of the failure's directions under each random candidate."""
    samples = [_changed(c.sketches.reshape(-1, c.sketches.shape[-1])) for c in drawn]
    pooled = unit(np.concatenate(samples))
    directions = np.linalg.eigh(pooled.T @ pooled)[1][:, ::-1][:, : min(_RANK, pooled.shape[1])]
    rank = directions.shape[1]
    d = unit(observed @ directions)
    found = []
    for sample in samples:
        w = unit(sample @ directions)
        covariance = w.T @ w / max(1, len(w)) * rank
        covariance = (1 - _SHRINK) * covariance + _SHRINK * np.eye(rank)
        root = np.linalg.cholesky(covariance)
        quadratic = np.square(np.linalg.solve(root, d.T)).sum(0) * rank
        found.append(-np.log(np.diag(root)).sum() * len(d) - rank / 2 * np.log(quadratic / rank).sum())
    return np.array(found)


def _changed(rows: Array) -> Array:
    return np.asarray(rows[np.square(rows).sum(-1) > 0])


def unit(rows: Array) -> Array:
    return np.asarray(rows / np.maximum(np.sqrt(np.square(rows).sum(-1, keepdims=True)), 1e-300))
