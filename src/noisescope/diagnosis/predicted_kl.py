"""The screen as numbers: predicted KL of any set of sites.

Of noise it comes from Fisher sums at scale 1 (measures/fisher.py), which grow with the square of the scale; of a number
format from the projection of its own rounding errors on gradients (measures/format_screen.py), which has no scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from noisescope.diagnosis import format_question
from noisescope.diagnosis.context import Array, StudyContext
from noisescope.injection import Injection
from noisescope.sites import Site
from noisescope.trials import Results, Trial, missing

NOT_FINITE = "without any noise the model computes NaN or infinity on every sample, so nothing can be predicted"


def screen_injection(context: StudyContext) -> Injection:
    """Noise of scale 1 on every operator of every place: sums scale with s^2. Or the format, wherever it may fall."""
    settings = context.settings
    if settings.question is not None:
        operators = {"linear", "embedding"} if settings.on == "weights" else set(settings.operators)
        tensor = format_question.TENSOR[settings.on]
        return Injection(settings.perturbation, frozenset(operators), tensor=tensor, phases=frozenset({"forward"}))
    unit = dataclasses.replace(context.settings.perturbation, scale=1.0)
    return Injection(unit, phases=frozenset({"forward"}))


def screen_trials(context: StudyContext) -> list[Trial]:
    where, settings = screen_injection(context), {"draws": context.settings.draws, "seed": 0}
    measure = "screen" if context.settings.question is None else "format_screen"
    return [Trial(context.conditions, measure, part, where, settings) for part in context.test]


def propose(context: StudyContext, results: Results) -> list[Trial]:
    return missing(screen_trials(context), results)


@dataclass(frozen=True)
class Screened:
    """Sums per token: `samples` [sites, samples], `channels` (means over finite samples) an array a site.

    With a scale they are Fisher sums at scale 1. Without one they are the predicted KL of a format, and there are no
    channels.
    """

    sites: tuple[Site, ...]
    samples: Array
    channels: tuple[Array, ...]
    scale: float | None
    error: str = ""
    unpredicted: tuple[str, ...] = ()  # sites that could not be followed: changed in place, or fused experts

    @property
    def factor(self) -> float:
        """What a sum is multiplied by to be a KL."""
        return 1.0 if self.scale is None else self.scale**2 / 2

    def predicted(self, select: Callable[[Site], bool]) -> Array:
        """Predicted KL per sample in nats, of the selected sites together, at the settings' scale."""
        rows = [i for i, site in enumerate(self.sites) if select(site)]
        total: Array = self.samples[rows].sum(0) * self.factor
        return total

    def in_layer(self, layer: int) -> Array:
        """Predicted KL per sample of all operators of one block."""
        return self.predicted(lambda site: site.place == layer)

    def predicted_by(self, injection: Injection, scale: float | None = None) -> Array:
        """Predicted KL per sample of an injection, at the settings' scale or another."""
        total: Array = self.predicted(injection.selects)
        return total if scale is None or self.scale is None else total * (scale / self.scale) ** 2

    def by_channel(self, site: Site) -> Array:
        """Predicted KL of each channel of a site: means over the samples."""
        total: Array = self.channels[self.sites.index(site)] * self.factor
        return total


def finite_mean(values: Array) -> float:
    """Of the samples on which it is finite."""
    known = np.isfinite(values)
    return float(values[known].mean()) if known.any() else 0.0


def site_of(facts: Mapping[str, Any]) -> Site:
    """A site as a trial's result keeps it."""
    return Site(facts["operator"], facts["place"], facts["module"], facts["component"], occurrence=facts["occurrence"])


def conclude(context: StudyContext, results: Results) -> Screened | None:
    """The screen of all slices combined; None if there is none."""
    trials = screen_trials(context)
    if missing(trials, results):
        return None
    found = [results[trial.id] for trial in trials]
    failed = next((result.error for result in found if result.failed), "")
    if failed:
        return Screened((), np.zeros((0, 0)), (), context.settings.scale, failed)
    sites = tuple(map(site_of, found[0].facts["sites"]))
    samples = np.concatenate([result.arrays["sums"] / result.arrays["tokens"] for result in found], axis=1)
    unpredicted = tuple(sorted({name for result in found for name in result.facts["lost"]}))
    finite = int(np.isfinite(samples).all(0).sum())
    if not finite:
        return Screened((), np.zeros((0, 0)), (), context.settings.scale, NOT_FINITE)
    if context.settings.question is not None:
        return Screened(sites, samples, (), None, unpredicted=unpredicted)
    flat = sum(result.arrays["channels"].astype(np.float64) for result in found) / finite
    ends = np.cumsum([f["channels"] for f in found[0].facts["sites"]])[:-1]
    by_site = tuple(np.split(np.asarray(flat), ends))
    return Screened(sites, samples, by_site, context.settings.scale, unpredicted=unpredicted)
