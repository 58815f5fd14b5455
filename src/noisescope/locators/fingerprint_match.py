"""Which simulated fault a failure's fingerprint belongs to, and whether it belongs to any.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noisescope.locators.fingerprint_bench import Array, Setting

Mask = NDArray[np.bool_]

_RANK = 64
_SHRINK = 0.05  # of a covariance towards a multiple of 1
# Of log-likelihoods, since the numbers in a fingerprint are not independent. Draws of the candidates themselves, held
# out one after the other, are given their own layer the largest mean log-probability at 6 (-0.81; -0.84 at 4, -0.95 at
# 12), where the likeliest layer has 0.66 on average and is right in 0.70 (demo, float32, n = 510; bfloat16 the same).
_TEMPERATURE = 6.0
_TOLD_APART = 0.5  # of the probability that a layer with its neighbours must hold: more likely there than elsewhere


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
    """How well a fault in each layer explains the failure, whether one does at all, and how that is known."""

    fits: Mapping[int, Fit]
    fitting: bool
    note: str


def cosines(a: Array, b: Array, floor: float) -> Array:
    """Mean over prompts of the cosine of a [..., P, V] and b [..., P, V], broadcast.

    A prompt that neither changes (rms within `floor`) says nothing, one that only one of them changes counts as 0.
    """
    products, sizes = (a * b).sum(-1), [np.sqrt(np.square(t).sum(-1)) for t in (a, b)]
    limit = floor * np.sqrt(a.shape[-1])
    both, either = (sizes[0] > limit) & (sizes[1] > limit), (sizes[0] > limit) | (sizes[1] > limit)
    values = np.where(both, products / np.maximum(sizes[0] * sizes[1], 1e-300), 0.0)
    mean: Array = values.sum(-1) / np.maximum(either.sum(-1), 1)
    return mean


def same_seed(candidates: Sequence[Candidate], changed: Mask) -> Match:
    """By cosine; a candidate fits that is the failure itself, or is nearer to it than any two in different layers."""
    best = best_by_cosine(candidates)
    top = max(best.values(), key=lambda c: (c.identical, c.cosine))
    fits = {
        layer: Fit(c, c.cosine, 1.0 if c.identical else max(0.0, c.cosine), "mean cosine") for layer, c in best.items()
    }
    known = "an identity test: candidates have the seed and the noise model of the failure, which no device tells"
    if top.identical:
        return Match(fits, True, known)
    reach = _reach(candidates, candidates, changed, "layer")
    other = "no candidate repeats the failure bit for bit: another seed, family, size or kind of device"
    return Match(fits, top.cosine > reach, f"{known}; {other} (best cosine {top.cosine:.3f}, wrong layers {reach:.3f})")


def blind(observed: Array, candidates: Sequence[Candidate], changed: Mask) -> Match:
    """By cosine where that is beyond what misfits reach, else by covariance; `observed` [P changed, S]."""
    direct = [c for c in candidates if not c.setting.drawn]
    drawn = [c for c in candidates if c.setting.drawn]
    best = best_by_cosine(direct)
    top = max(best.values(), key=lambda c: c.cosine, default=None)
    cosine = -1.0 if top is None else top.cosine
    by_chance = chance(candidates, changed)
    if top is not None and (cosine > by_chance or not drawn):
        reach = max(_reach(direct, direct, changed, "family"), _reach([top], direct, changed, "layer"))
        fits = {layer: Fit(c, c.cosine, _confidence(c, best), "mean cosine") for layer, c in best.items()}
        note = f"best cosine {cosine:.3f}; drawn faults reach {by_chance:.3f}, other families and layers {reach:.3f}"
        return Match(fits, cosine > reach, f"matched by cosine: {note}")
    fits = _by_covariance(observed, drawn)
    share = _with_neighbours(fits)
    common, usual = coherence(observed), max(coherence(draw) for c in drawn for draw in c.sketches[:, changed])
    note = (
        f"no fault that is a function of the data fits (best cosine {cosine:.3f}, {by_chance:.3f} by chance): matched "
        f"by the covariance of drawn ones, which tells neighbouring layers apart poorly; the likeliest layer with its "
        f"neighbours has {share:.2f} of the probability; prompts have {common:.1f} in common, drawn faults' up to "
        f"{usual:.1f}"
    )
    return Match(fits, share > _TOLD_APART and common <= usual, note)


def best_by_cosine(candidates: Sequence[Candidate]) -> dict[int, Candidate]:
    """The candidate with the largest cosine in each layer."""
    return {c.layer: c for c in sorted(candidates, key=lambda candidate: (candidate.identical, candidate.cosine))}


def chance(candidates: Sequence[Candidate], changed: Mask) -> float:
    """The largest cosine of any drawn fingerprint with any that is not, over the prompts that the failure changed."""
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
    """The largest cosine of `ones` with `others` of another kind ("family" or "layer"): what a misfit may have."""

    def of(candidate: Candidate) -> str | int:
        return candidate.layer if kind == "layer" else candidate.setting.family

    unlike = np.array([[of(a) != of(b) for b in others] for a in ones])
    found = _similarities(_first_draws(ones, changed), _first_draws(others, changed))[unlike]
    return float(found.max(initial=-1.0))


def _first_draws(candidates: Sequence[Candidate], changed: Mask) -> Array:
    return np.stack([c.sketches[0][changed] for c in candidates])


def _similarities(a: Array, b: Array) -> Array:
    """[A, P, S], [B, P, S] -> [A, B]: mean cosines over prompts."""
    means: Array = unit(a).reshape(len(a), -1) @ unit(b).reshape(len(b), -1).T / a.shape[1]
    return means


def _confidence(candidate: Candidate, best: Mapping[int, Candidate]) -> float:
    """Near 1 for the layer that fits alone; shared by layers that fit alike."""
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
    """The probability of the likeliest layer and of the one before and the one behind it."""
    top = max(fits, key=lambda layer: fits[layer].score)
    return sum(fit.score for layer, fit in fits.items() if abs(layer - top) <= 1)


def _log_likelihoods(observed: Array, drawn: Sequence[Candidate]) -> Array:
    """Of the failure's directions, under each drawn candidate."""
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
    changed: Array = rows[np.square(rows).sum(-1) > 0]
    return changed


def unit(rows: Array) -> Array:
    found: Array = rows / np.maximum(np.sqrt(np.square(rows).sum(-1, keepdims=True)), 1e-300)
    return found
