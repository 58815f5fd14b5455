"""`fingerprint`: match the outputs of a faulty device with outputs of a good one under simulated faults.

A fingerprint is logits(faulty) - logits(clean), for the last token of each prompt. A good system simulates candidates
over layers, fault families and sizes; the suspect's fingerprint comes from a record made elsewhere.

**same-seed** is the published method: candidates use the noise model and the seed of the failure, and the score is the
mean cosine over prompts. The right candidate then reproduces the failure bit for bit, so this is an identity test of
two simulations, not a diagnosis: no real device has a known seed.

**blind** knows neither family nor seed. Deterministic faults (dead zone, saturation, bias) are matched by the same
cosine; random faults (noise, relative noise on products, spikes) by the covariance of their effect on the logits
(fingerprint_match.py). If no candidate fits better than a mismatch would, or several layers fit equally well, the
verdict is undecided.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from noisescope import progress
from noisescope.comparison.records import Record, check_comparable
from noisescope.errors import InvalidInput, unknown
from noisescope.faults import FAMILIES
from noisescope.localization.fingerprint_match import (
    NOTES_NOISE,
    Array,
    Candidate,
    Fit,
    Mask,
    Setting,
    TrialRunner,
    best_by_cosine,
    blind,
    chance,
    cosines,
    same_seed,
    settings,
    sketch,
)
from noisescope.localization.inputs import parts_of, recorded
from noisescope.localization.prompts import chosen_layers
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import Prompts
from noisescope.model.loading import Subject
from noisescope.sites import Site

MODES = ("blind", "same-seed")
DRAWS = 16  # of each drawn candidate, for each prompt
# Times what rounding does (TrialRunner.floor), in rms of one prompt, before anything is called a fault. Healthy
# models reach 0.92 with another attention kernel or batch size (n = 1,728 prompts), and 3.8 with the noise of 2 eps at
# every operator that the floor itself is made of, drawn again (n = 4,320; demo and two tiny models, three dtypes).
_MARGIN = 4.0
_REFINED, _FINEST, _SURE = (
    8,
    1.05,
    0.999,
)  # layers whose best size is searched, how finely, and the cosine that suffices
_PROMISING = 0.5  # of the cosine that drawn faults reach: below, no size is sought
_WHAT_TO_DO = (
    "try other families or sizes (in Python), or run `noisescope locate` on the suspect device itself, with "
    "--reference and a record made with --detail full on a good device if you have one"
)


def fingerprint(
    subject: Subject | nn.Module,
    failure: Record | str | Path,
    reference: Record | str | Path | None = None,
    *,
    mode: str = "blind",
    families: Iterable[str] | None = None,
    sizes: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> Verdict:
    """Find the layer whose simulated fault best explains a failure.

        fingerprint(ns.load("path/to/model"), "suspect.record", "good.record")

    `subject` is the model on a good system, where candidates are simulated. `failure` is the record of the suspect,
    `reference` that of a good system; without one, what `subject` says now. Of both the last token's logits are taken.
    `families` and `sizes` (for all families, or by family) are the candidates. `seed` is that of the failure in the
    same-seed mode.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    model, _, anatomy = parts_of(subject)
    suspect = recorded(failure, model)
    good = None if reference is None else recorded(reference, model)
    if good is not None:
        check_comparable(good, suspect)
    logits, clean = _logits(suspect), None if good is None else _logits(good)
    faults = tuple(settings(mode, families, sizes, seed))
    chosen = chosen_layers(layers, len(anatomy.blocks))
    with TrialRunner(model, anatomy, batches_of(suspect), draws=draws) as runner:
        return explained(runner, logits, clean, mode=mode, faults=faults, layers=chosen)


def batches_of(record: Record) -> list[Prompts]:
    """The prompts that shared a forward."""
    return [record.prompts[batch.first : batch.first + batch.count] for batch in record.batches]


def explained(
    runner: TrialRunner,
    logits: Array,
    clean: Array | None,
    *,
    mode: str,
    faults: Sequence[Setting],
    layers: Sequence[int],
) -> Verdict:
    """Find what a failure's logits [P, V] come from, among faults that the runner simulates."""
    name = f"fingerprint {mode}"
    usable: Mask = np.atleast_1d(np.isfinite(logits).all(1))
    floor = _MARGIN * runner.floor()
    visible = {"rms_of_logits": float(f"{floor:.3g}")}
    observed = np.where(usable[:, None], logits - (runner.clean if clean is None else clean), 0.0)
    sizes = np.sqrt(np.square(observed).mean(1))
    changed: Mask = np.atleast_1d(sizes > floor)
    broken = f"{int((~usable).sum())} of {len(usable)} prompts gave logits that are not finite"
    if not changed.any():
        if usable.all():
            verdict, note = "healthy", "the logits match the reference within rounding in every prompt"
        else:
            verdict, note = "faulty", f"{broken}, and the others match the reference: nothing to compare"
        return Verdict(verdict, name, (), visible, runner.forwards, logits.size, (note,))
    pairs = list(itertools.product(faults, layers))
    with progress.plan(progress.Phase("candidates", len(pairs))):
        candidates = [
            _candidate(runner, layer, setting, observed, logits, floor, blind=mode == "blind")
            for setting, layer in progress.track("candidates", pairs)
        ]
    if mode == "blind" and _may_fit(candidates, changed):
        progress.begin("sizes between the candidates")
        candidates += _refined(runner, candidates, observed, logits, floor)
    if mode == "same-seed":
        match = same_seed(candidates, changed)
    else:
        match = blind(sketch(observed[changed]), candidates, changed)
    notes: tuple[str, ...] = (match.note,)
    if not usable.all():
        notes += (f"{broken}: excluded",)
    if match.fitting:
        suspects = ranked(_suspect(runner.anatomy, layer, fit) for layer, fit in match.fits.items())
        return Verdict("faulty", name, suspects, visible, runner.forwards, len(candidates), notes)
    if match.alike:
        suspects = ranked(_suspect(runner.anatomy, layer, fit) for layer, fit in match.fits.items())
        verdict = "undecided" if usable.all() else "faulty"
        return Verdict(verdict, name, suspects, visible, runner.forwards, len(candidates), (*notes, _WHAT_TO_DO))
    differ = (
        f"the logits differ in {int(changed.sum())} of {len(changed)} prompts (rms up to {sizes.max():.3g}), but no "
        f"candidate explains them; tried: {_words(faults)}, each in {len(layers)} layers"
    )
    verdict = "undecided" if usable.all() else "faulty"
    return Verdict(verdict, name, (), visible, runner.forwards, len(candidates), (differ, *notes, _WHAT_TO_DO))


def _logits(record: Record) -> Array:
    logits = record.logits()
    if logits is None:
        raise InvalidInput(f"{record.path} holds no logits, so it is not a record of a language model")
    return logits


def _candidate(
    runner: TrialRunner, layer: int, setting: Setting, observed: Array, failure: Array, floor: float, *, blind: bool
) -> Candidate:
    logits = runner.faulty_logits(layer, setting, draws=runner.draws if blind and setting.drawn else 1)
    found = np.nan_to_num(logits - runner.clean, nan=0.0, posinf=0.0, neginf=0.0)
    identical = bool((logits[0] == failure).all())
    return Candidate(layer, setting, float(cosines(found[0], observed, floor)), identical, sketch(found))


def _may_fit(candidates: list[Candidate], changed: Mask) -> bool:
    """Whether a deterministic fault is close but not yet of the right size."""
    top = max((c.cosine for c in candidates if not c.setting.drawn), default=-1.0)
    return _PROMISING * chance(candidates, changed) < top < _SURE


def _refined(
    runner: TrialRunner, candidates: list[Candidate], observed: Array, failure: Array, floor: float
) -> list[Candidate]:
    """The best deterministic fits, tried again with sizes between and beyond the given ones."""
    found: list[Candidate] = []
    best = best_by_cosine([c for c in candidates if not c.setting.drawn and c.setting.size])
    for start in sorted(best.values(), key=lambda candidate: -candidate.cosine)[:_REFINED]:
        nearest, step = start, 2.0
        while step > _FINEST and nearest.cosine < _SURE:
            sizes = [size for factor in (1 / step, step) if (size := nearest.setting.resized(factor)) is not None]
            tried = [_candidate(runner, start.layer, size, observed, failure, floor, blind=True) for size in sizes]
            found += tried
            nearest, step = max([nearest, *tried], key=lambda candidate: candidate.cosine), step**0.5
    return found


def _words(faults: Sequence[Setting]) -> str:
    """Families with their sizes."""
    by_family: dict[str, list[str]] = {}
    for setting in faults:
        by_family.setdefault(setting.family, []).extend([] if setting.size is None else [f"{setting.size:g}"])
    return "; ".join(f"{family} {', '.join(sizes)}".strip() for family, sizes in by_family.items())


def _suspect(anatomy: Anatomy, layer: int, fit: Fit) -> Suspect:
    candidate, setting = fit.candidate, fit.candidate.setting
    kind = "noise" if setting.family == NOTES_NOISE else FAMILIES[setting.family].fault_class
    same = ", identical logits bit for bit" if candidate.identical else ""
    evidence = f"{setting.words} in this layer: {fit.how} {fit.score:.4f}{same}"
    details: dict[str, Any] = {
        "family": setting.family,
        "size": setting.size,
        "cosine": candidate.cosine,
        "identical": candidate.identical,
    }
    site = Site("residual", layer, anatomy.blocks[layer])
    return Suspect(site, kind, fit.confidence, evidence, fit.score, details=details, class_confidence=fit.confidence)
