"""`fingerprint`: what a faulty device said, against what a good one says with a fault simulated in it.

A fingerprint is logits(faulty) - logits(clean), for the last token of each prompt. A good system simulates candidates
over layers, fault families and sizes; the suspect's fingerprint comes from a record made elsewhere.

**same-seed** is the published method: candidates have the noise model and the seed of the failure, and the score is the
mean cosine over prompts. The right candidate then repeats the failure bit for bit, so this is an identity test of two
simulations, not a diagnosis: no device tells its seed.

**blind** knows neither family nor seed. Faults that are functions of the data (dead zone, saturation, bias) are matched
by the same cosine. Faults that draw (noise, spikes) have no fingerprint of their own, only a distribution: a block's
error reaches the logits through the blocks behind it, and the covariance of what arrives depends on the layer and not
on the seed. Draws of each candidate give that covariance C, and the failure's fingerprints d are scored by the angular
central Gaussian, in which the size of each d, and so that of the fault, drops out (Tyler 1987):

    log p(d) = -1/2 log det C - r/2 log(d' C^-1 d),    d in the r leading directions of all draws

Which of the two speaks is decided by the cosines that drawn candidates have with the others by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from noisescope.anatomy import Anatomy
from noisescope.errors import InvalidInput, unknown
from noisescope.faults import FAMILIES
from noisescope.locators.fingerprint_bench import NOTES_NOISE, Array, Bench, Setting, settings, sketch
from noisescope.locators.outputs import OutputRecord, check_alike, check_model, load_outputs
from noisescope.locators.prompts import parts_of
from noisescope.locators.verdict import Suspect, Verdict, ranked
from noisescope.model import Subject
from noisescope.sites import Site

Mask = NDArray[np.bool_]

MODES = ("blind", "same-seed")
DRAWS = 16  # of each drawn candidate, for each prompt
_RANK = 64
_SHRINK = 0.05  # of a covariance towards a multiple of 1
_MARGIN = 4.0  # times what rounding does, in rms, before anything is called a fault
_REFINED, _FINEST, _SURE = 8, 1.05, 0.999  # layers whose best size is sought, how finely, and the cosine that will do
_PROMISING = 0.7  # of the cosine that chance gives: below, no size is sought
_TEMPERATURE = 12.0  # of log-likelihoods: the numbers in a fingerprint are far from independent


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


def fingerprint(
    subject: Subject | nn.Module,
    failure: OutputRecord | str | Path,
    reference: OutputRecord | str | Path | None = None,
    *,
    mode: str = "blind",
    families: Iterable[str] | None = None,
    sizes: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> Verdict:
    """The layer whose simulated fault explains a failure best.

        fingerprint(ns.load("path/to/model"), "suspect.npz", "good.npz")

    `subject` is the model on a good system, where candidates are simulated. `failure` is what the suspect said
    (`record_outputs` there), `reference` what a good system said; without one, what `subject` says now. `families` and
    `sizes` (for all families, or by family) are the candidates. `seed` is that of the failure in the same-seed mode.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    model, _, anatomy = parts_of(subject)
    suspect = _record(failure, model)
    good = None if reference is None else _record(reference, model)
    if good is not None:
        check_alike(suspect, good, "the failure's record")
    faults = list(settings(mode, families, sizes, seed))
    chosen = _layers(layers, len(anatomy.blocks))
    name = f"fingerprint {mode}"
    with Bench(model, anatomy, suspect.prompts, draws=draws) as bench:
        clean = bench.clean if good is None else good.logits.astype(np.float64)
        said = suspect.logits.astype(np.float64)
        usable: Mask = np.atleast_1d(np.isfinite(said).all(1))
        floor = _MARGIN * bench.floor()
        visible = {"rms_of_logits": float(f"{floor:.3g}")}
        observed = np.where(usable[:, None], said - clean, 0.0)
        changed: Mask = np.atleast_1d(np.sqrt(np.square(observed).mean(1)) > floor)
        if not changed.any():
            verdict, note = _unlocated(usable)
            return Verdict(verdict, name, (), visible, bench.forwards, 0, (note,))
        candidates = [
            _candidate(bench, layer, setting, observed, said, floor, blind=mode == "blind")
            for setting in faults
            for layer in chosen
        ]
        if mode == "blind" and _may_fit(candidates, changed):
            candidates += _refined(bench, candidates, observed, said, floor)
    if mode == "same-seed":
        fits, notes = _same_seed(candidates)
    else:
        fits, notes = _blind(sketch(observed[changed]), candidates, changed)
    if not usable.all():
        notes += (f"{int((~usable).sum())} of {len(usable)} prompts gave logits that are not finite: left out",)
    suspects = ranked(_suspect(anatomy, layer, fit) for layer, fit in fits.items())
    return Verdict("faulty", name, suspects, visible, bench.forwards, len(candidates), notes)


def _unlocated(usable: Mask) -> tuple[str, str]:
    if usable.all():
        return "healthy", "the suspect's logits differ from the good ones by no more than rounding, in every prompt"
    broken = f"{int((~usable).sum())} of {len(usable)} prompts gave logits that are not finite"
    return "faulty", f"{broken}, and the others are right: nothing to compare"


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


def _candidate(
    bench: Bench, layer: int, setting: Setting, observed: Array, said: Array, floor: float, *, blind: bool
) -> Candidate:
    logits = bench.faulty_logits(layer, setting, draws=bench.draws if blind and setting.drawn else 1)
    found = np.nan_to_num(logits - bench.clean, nan=0.0, posinf=0.0, neginf=0.0)
    identical = bool((logits[0].astype(np.float32) == said.astype(np.float32)).all())
    return Candidate(layer, setting, float(cosines(found[0], observed, floor)), identical, sketch(found))


def _may_fit(candidates: list[Candidate], changed: Mask) -> bool:
    """Whether a fault that is a function of the data is near, but not of the right size yet."""
    top = max((c.cosine for c in candidates if not c.setting.drawn), default=-1.0)
    return _PROMISING * _by_chance(candidates, changed) < top < _SURE


def _refined(bench: Bench, candidates: list[Candidate], observed: Array, said: Array, floor: float) -> list[Candidate]:
    """The best fits that are functions of the data, tried with sizes between and beyond the given ones."""
    found: list[Candidate] = []
    best = _best([c for c in candidates if not c.setting.drawn and c.setting.size])
    for start in sorted(best.values(), key=lambda candidate: -candidate.cosine)[:_REFINED]:
        nearest, step = start, 2.0
        while step > _FINEST and nearest.cosine < _SURE:
            sizes = [size for factor in (1 / step, step) if (size := nearest.setting.resized(factor)) is not None]
            tried = [_candidate(bench, start.layer, size, observed, said, floor, blind=True) for size in sizes]
            found += tried
            nearest, step = max([nearest, *tried], key=lambda candidate: candidate.cosine), step**0.5
    return found


def _same_seed(candidates: list[Candidate]) -> tuple[dict[int, Fit], tuple[str, ...]]:
    notes: tuple[str, ...] = (
        "an identity test: candidates have the seed and the noise model of the failure, which no device tells",
    )
    best = _best(candidates)
    fits = {
        layer: Fit(c, c.cosine, 1.0 if c.identical else max(0.0, c.cosine), "mean cosine") for layer, c in best.items()
    }
    if not any(c.identical for c in candidates):
        notes += ("no candidate repeats the failure bit for bit: another seed, family, size or kind of device",)
    return fits, notes


def _blind(observed: Array, candidates: list[Candidate], changed: Mask) -> tuple[dict[int, Fit], tuple[str, ...]]:
    """`observed` are sketches of the failure in the prompts that it changed."""
    direct = [c for c in candidates if not c.setting.drawn]
    drawn = [c for c in candidates if c.setting.drawn]
    best = _best(direct)
    top = max((c.cosine for c in best.values()), default=-1.0)
    chance = _by_chance(candidates, changed)
    if direct and (top > chance or not drawn):
        fits = {layer: Fit(c, c.cosine, _direct_confidence(c, best, top), "mean cosine") for layer, c in best.items()}
        return fits, (f"matched by cosine: best {top:.3f}, drawn faults reach {chance:.3f} by chance",)
    likelihood = _log_likelihoods(observed, drawn)
    weight = np.exp((likelihood - likelihood.max()) / _TEMPERATURE)
    posterior: dict[int, float] = {}
    for candidate, share in zip(drawn, weight / weight.sum(), strict=True):
        posterior[candidate.layer] = posterior.get(candidate.layer, 0.0) + float(share)
    most = {c.layer: c for c, _ in sorted(zip(drawn, likelihood, strict=True), key=lambda pair: float(pair[1]))}
    fits = {layer: Fit(c, posterior[layer], posterior[layer], "covariance of draws") for layer, c in most.items()}
    return fits, (
        f"no fault that is a function of the data fits (best cosine {top:.3f}, {chance:.3f} by chance): matched by the "
        "covariance of drawn ones, which tells neighbouring layers apart poorly",
    )


def _best(candidates: list[Candidate]) -> dict[int, Candidate]:
    """The candidate with the largest cosine in each layer."""
    return {c.layer: c for c in sorted(candidates, key=lambda candidate: candidate.cosine)}


def _direct_confidence(candidate: Candidate, best: Mapping[int, Candidate], top: float) -> float:
    """Near 1 for the layer that fits alone; shared by layers that fit alike."""
    misfit = {layer: max(1 - c.cosine, 1e-6) for layer, c in best.items()}
    shares = {layer: (1 / value) ** 2 for layer, value in misfit.items()}
    return max(0.0, top) * shares[candidate.layer] / sum(shares.values())


def _by_chance(candidates: list[Candidate], changed: Mask) -> float:
    """The largest cosine of any drawn fingerprint with any that is not, over the prompts that the failure changed."""
    direct, drawn = ([c for c in candidates if c.setting.drawn == kind] for kind in (False, True))
    if not direct or not drawn:
        return 0.0
    a = _unit(np.stack([c.sketches[0][changed] for c in direct]))  # [D, P, S]
    b = _unit(np.concatenate([c.sketches[:, changed] for c in drawn]))  # [N, P, S]
    means = a.reshape(len(a), -1) @ b.reshape(len(b), -1).T / changed.sum()
    return float(means.max())


def _log_likelihoods(observed: Array, drawn: list[Candidate]) -> Array:
    """Of the failure's directions, under each drawn candidate."""
    samples = [_changed(c.sketches.reshape(-1, c.sketches.shape[-1])) for c in drawn]
    pooled = _unit(np.concatenate(samples))
    directions = np.linalg.eigh(pooled.T @ pooled)[1][:, ::-1][:, : min(_RANK, pooled.shape[1])]
    rank = directions.shape[1]
    d = _unit(observed @ directions)
    found = []
    for sample in samples:
        w = _unit(sample @ directions)
        covariance = w.T @ w / max(1, len(w)) * rank
        covariance = (1 - _SHRINK) * covariance + _SHRINK * np.eye(rank)
        root = np.linalg.cholesky(covariance)
        quadratic = np.square(np.linalg.solve(root, d.T)).sum(0) * rank
        found.append(-np.log(np.diag(root)).sum() * len(d) - rank / 2 * np.log(quadratic / rank).sum())
    return np.array(found)


def _changed(rows: Array) -> Array:
    changed: Array = rows[np.square(rows).sum(-1) > 0]
    return changed


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.maximum(np.sqrt(np.square(rows).sum(-1, keepdims=True)), 1e-300)
    return unit


def _suspect(anatomy: Anatomy, layer: int, fit: Fit) -> Suspect:
    candidate, setting = fit.candidate, fit.candidate.setting
    kind = "noise" if setting.family == NOTES_NOISE else FAMILIES[setting.family].fault_class
    same = ", the same logits bit for bit" if candidate.identical else ""
    evidence = f"{setting.words} in this layer: {fit.how} {fit.score:.4f}{same}"
    details: dict[str, Any] = {
        "family": setting.family,
        "size": setting.size,
        "cosine": candidate.cosine,
        "identical": candidate.identical,
    }
    site = Site("residual", layer, anatomy.blocks[layer])
    return Suspect(site, kind, fit.confidence, evidence, fit.score, details=details)


def _record(given: OutputRecord | str | Path, model: nn.Module) -> OutputRecord:
    if isinstance(given, (str, Path)):
        return load_outputs(given, subject=model)
    if not isinstance(given, OutputRecord):
        raise InvalidInput(f"outputs are a record or the path of a saved one, got {type(given).__name__}")
    check_model(given, model)
    return given


def _layers(layers: Iterable[int] | None, blocks: int) -> tuple[int, ...]:
    chosen = tuple(range(blocks)) if layers is None else tuple(sorted(set(layers)))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < blocks:
        raise InvalidInput(f"layers {list(chosen)} are out of range: the model has blocks 0 to {blocks - 1}")
    return chosen
