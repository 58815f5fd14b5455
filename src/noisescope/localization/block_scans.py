"""`scans`: statistics of each block's input and output, from a few forwards; the verdict may be "healthy".

It uses two kinds of evidence of different strength:

- **Exact.** `bookkeeping`: a block's output is the sum of its input and of what its branches gave, bit for bit; a fault
  at the output breaks that there and nowhere else, whatever its kind and size. `instability`: the same input, bit for
  bit, gave another output. These make the verdict.
- **Profiles.** `gain`, `kurtosis`, `pile_up` and `mean_shift` have no value that they must have: a layer can only be
  compared with the others, by z = (value - median) / (1.4826 MAD). The limit of |z| is set for a stated rate of false
  alarms, and the rate holds for layers that are alike. Layers are not: massive activations appear in one and vanish in
  another, and there a healthy model has |z| in the hundreds. So a profile alone never makes "faulty": where a block's
  sum is exact it is reported in a note, elsewhere the verdict is "undecided".

Errors inside a branch that repeat from run to run (a wrong linear, a wrong softmax) are not detected here: sums are
right with a wrong summand as well. `audit` and `relations` detect them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from noisescope.errors import InvalidInput, NothingInjected, unknown
from noisescope.localization.audit_verdict import suspects_of
from noisescope.localization.block_statistics import PROFILES, Readings, Scanner
from noisescope.localization.inputs import batches_for, parts_of
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import evaluating
from noisescope.model.loading import Subject
from noisescope.sites import Site

SCANS = ("bookkeeping", "instability", *PROFILES)
METHOD = "scans"
RUNS = 3
_SIDES = {"gain": (-1,), "kurtosis": (-1, 1), "pile_up": (1,), "mean_shift": (-1, 1)}  # where faults show
_CLASSES = {
    ("gain", -1): "dead zone",
    ("kurtosis", -1): "saturation",
    ("kurtosis", 1): "spike",
    ("pile_up", 1): "saturation",
    ("mean_shift", -1): "bias",
    ("mean_shift", 1): "bias",
}
_LEAST_SPREAD = {"gain": 0.01, "kurtosis": 0.01, "pile_up": 1.0, "mean_shift": 0.01}  # MADs below say nothing
_ROUNDING = 4.0  # times the dtype's eps: what runs may differ by on devices that sum in no fixed order
_SIMULATED = 4000


def scans(
    subject: Subject | nn.Module,
    *,
    prompts: Any = None,
    seed: int = 0,
    which: Iterable[str] = SCANS,
    runs: int = RUNS,
    false_alarms: float = 0.01,
) -> Verdict:
    """Find blocks with a wrong output by local scans: three forwards, and each block called once more.

        with faulty(subject.model, "bias:0.01@10"):
            verdict = scans(subject)          # verdict.suspects[0].site.place == 10

    `prompts` are texts, token ids or batches (default: 64 tokens of built-in text); the first of them is run `runs`
    times, the others once. `which` names the scans to make. `false_alarms` is the nominal rate of the profile scans
    over all layers, if layers were alike. The model runs as it is, in this thread and inside the scopes that are open.
    """
    chosen = _checked(which, runs, false_alarms)
    model, tokenizer, anatomy = parts_of(subject)
    count = len(prompts) if isinstance(prompts, (list, tuple)) else 1  # one batch alone gets a second one there
    batches = batches_for(model, tokenizer, prompts, seed)[:count]
    scanner = Scanner(model, anatomy, which=chosen, seed=seed)
    with evaluating(model), torch.no_grad():
        scanner.run(batches[0])
        for _ in range(runs - 1 if "instability" in chosen else 0):
            scanner.run(batches[0], repeated=True)
        for batch in batches[1:]:
            scanner.run(batch)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return conclude(anatomy, scanner.results, chosen, false_alarms, _ROUNDING * torch.finfo(dtype).eps)


def conclude(
    anatomy: Anatomy, results: Readings, which: frozenset[str], false_alarms: float, rounding: float
) -> Verdict:
    """The verdict of some readings; `rounding` is the relative difference that two healthy runs may have."""
    layers = {layer for values in results.profiles.values() for layer in values} | set(results.instability)
    if not layers and not results.elements:
        raise NothingInjected(
            "the model ran, but no block returned a tensor of its input's shape, so nothing was scanned"
        )
    profiles = {name: Profile.of(name, results.profiles[name]) for name in PROFILES if results.profiles[name]}
    limit = z_limit(len(layers), sum(len(_SIDES[name]) for name in profiles), false_alarms)
    odd = _odd_layers(profiles, limit)
    unstable = {layer for layer in results.unstable if results.instability[layer] > rounding}
    broken = {site.place for site in results.log.alarms if isinstance(site.place, int)}
    results.log.unrepeatable |= {_site(anatomy, layer) for layer in unstable}
    certain = unstable | broken
    nonfinite = results.nonfinite - certain
    unaccounted = {at for at in odd if "bookkeeping" not in which or at in results.unknown} - certain
    suspects = [
        *(dataclasses.replace(s, details={**s.details, "scan": "bookkeeping"}) for s in suspects_of(results.log)),
        *(_unrepeatable(anatomy, layer, results) for layer in unstable - broken),
        *(_nonfinite(anatomy, layer) for layer in nonfinite),
        *(_odd(anatomy, layer, odd[layer], limit) for layer in unaccounted - nonfinite),
    ]
    suspects = [dataclasses.replace(s, details={**s.details, **_numbers(s, profiles, results)}) for s in suspects]
    left_open = unaccounted or nonfinite or results.unknown or results.log.unseen
    verdict = "faulty" if certain else "undecided" if left_open else "healthy"
    visible = _visible(results, which, profiles, limit, rounding)
    notes = tuple(_notes(results, odd, certain | unaccounted, limit))
    tests = len(which) * len(anatomy.blocks)
    return Verdict(verdict, METHOD, ranked(suspects), visible, results.forwards, tests, notes)


@dataclass(frozen=True)
class Profile:
    """One scan's values over the layers, with their robust z-scores."""

    values: dict[int, float]
    z: dict[int, float]
    spread: float

    @classmethod
    def of(cls, name: str, results: Mapping[int, list[float]]) -> Profile:
        values = {layer: float(np.mean(found)) for layer, found in results.items()}
        middle = float(np.median(list(values.values())))
        mad = float(np.median([abs(value - middle) for value in values.values()]))
        spread = 1.4826 * max(mad, 0.01 * abs(middle), _LEAST_SPREAD[name])
        return cls(values, {layer: (value - middle) / spread for layer, value in values.items()}, spread)


@functools.cache
def z_limit(layers: int, sides: int, rate: float) -> float:
    """The |z| that healthy layers exceed with probability `rate`, if all layers were normal and alike.

    By simulation (z divides by a MAD of as few numbers as there are layers, so its tails are heavy), with a Bonferroni
    share for each side of each scan.
    """
    if layers == 0 or sides == 0:
        return math.inf
    drawn = np.random.default_rng(0).standard_normal((_SIMULATED, layers))
    middle = np.median(drawn, 1, keepdims=True)
    mad = np.median(np.abs(drawn - middle), 1, keepdims=True)
    largest = ((drawn - middle) / (1.4826 * np.maximum(mad, 1e-9))).max(1)
    return float(np.quantile(largest, 1 - rate / sides))


def _odd_layers(profiles: Mapping[str, Profile], limit: float) -> dict[int, tuple[str, float, float]]:
    """Layer -> the scan in which it stands out most, its value and its z."""
    odd: dict[int, tuple[str, float, float]] = {}
    for name, found in profiles.items():
        for layer, z in found.z.items():
            if abs(z) > limit and math.copysign(1, z) in _SIDES[name] and abs(z) > abs(odd.get(layer, ("", 0, 0))[2]):
                odd[layer] = (name, found.values[layer], z)
    return odd


def _unrepeatable(anatomy: Anatomy, layer: int, results: Readings) -> Suspect:
    size = results.instability[layer]
    evidence = f"instability: the same input gave outputs that differ by {size:.3g} of their std"
    score = 1 - 0.4 * layer / len(anatomy.blocks)  # after blocks with a wrong sum
    return Suspect(
        _site(anatomy, layer), "noise", 0.95, evidence, score, details={"scan": "instability"}, class_confidence=0.9
    )


def _nonfinite(anatomy: Anatomy, layer: int) -> Suspect:
    """It may be an overflow of a short dtype, which is no fault."""
    evidence = "its output holds NaN or infinity and its input does not"
    return Suspect(_site(anatomy, layer), "unknown", 0.5, evidence, 1 - layer / 10**6, details={"scan": "nonfinite"})


def _odd(anatomy: Anatomy, layer: int, found: tuple[str, float, float], limit: float) -> Suspect:
    name, value, z = found
    evidence = (
        f"{name}: {value:.3g}, z {z:+.1f} among the layers (limit {limit:.1f}); healthy models can have such layers too"
    )
    kind = _CLASSES[name, 1 if z > 0 else -1]
    score = 0.5 * abs(z) / (abs(z) + limit)
    details = {"scan": name, "z": z}
    return Suspect(_site(anatomy, layer), kind, 0.3, evidence, score, details=details, class_confidence=0.3)


def _site(anatomy: Anatomy, layer: int) -> Site:
    return Site("residual", layer, anatomy.blocks[layer])


def _numbers(suspect: Suspect, profiles: Mapping[str, Profile], results: Readings) -> dict[str, Any]:
    """Every scan's value at a suspect's layer."""
    layer = suspect.site.place
    assert isinstance(layer, int)
    numbers: dict[str, Any] = {}
    for name, found in profiles.items():
        if layer in found.values:
            numbers |= {name: found.values[layer], f"{name}_z": found.z[layer]}
    if layer in results.instability:
        numbers["instability"] = results.instability[layer]
    return numbers


def _visible(
    results: Readings, which: frozenset[str], profiles: Mapping[str, Profile], limit: float, rounding: float
) -> dict[str, Any]:
    """The smallest fault at a block's output that each scan could have detected; `change` is in the scan's own unit."""
    visible: dict[str, Any] = {}
    if "bookkeeping" in which:
        visible["bookkeeping"] = {"element_ulp": 1.0, "elements": results.elements, "blind": sorted(results.unknown)}
    if "instability" in which:
        visible["instability"] = {"relative_std": rounding}
    for name, found in profiles.items():
        visible[name] = {"change": float(f"{limit * found.spread:.3g}"), "z": float(f"{limit:.3g}")}
    return visible


def _notes(
    results: Readings, odd: Mapping[int, tuple[str, float, float]], reported: set[int], limit: float
) -> Iterator[str]:
    if results.unknown:
        blind = sorted(results.unknown)
        yield f"bookkeeping can't check blocks {blind}: their code can't be run on the host"
    quiet = [f"{layer} ({odd[layer][0]}, z {odd[layer][2]:+.0f})" for layer in sorted(set(odd) - reported)]
    if quiet:
        yield (
            f"layers that stand out from the others but whose sums are exact: {', '.join(quiet)}; limit of |z| "
            f"{limit:.1f}. Some layers stand out in healthy models, or a branch inside is faulty: check with `audit`"
        )
    yield (
        "scans can't detect deterministic errors inside a branch (a wrong linear, norm or softmax), because the sum "
        "is still exact when a summand is wrong; nor anything outside the blocks, in decode, other shapes or "
        "gradients. `audit` detects these"
    )
    steady = results.unstable - reported
    if steady:
        yield f"blocks {sorted(steady)} differ from run to run within rounding: they sum in no fixed order"


def _checked(which: Iterable[str], runs: int, false_alarms: float) -> frozenset[str]:
    chosen = frozenset({which} if isinstance(which, str) else which)
    for name in chosen:
        if name not in SCANS:
            raise unknown("scan", name, SCANS)
    if not chosen:
        raise InvalidInput(f"which is empty: name at least one of {', '.join(SCANS)}")
    if runs < 2 and "instability" in chosen:
        raise InvalidInput(f"the instability scan compares runs and needs at least 2, got runs={runs}")
    if not 0 < false_alarms < 1:
        raise InvalidInput(f"false_alarms must be between 0 and 1, got {false_alarms!r}")
    return chosen
