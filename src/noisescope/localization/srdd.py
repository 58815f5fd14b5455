"""`srdd`: the four probes of the original method notes with their weights, end to end, as the published baseline.

Noise of increasing scale is injected into the products of one layer at a time; the response is the divergence of the
last token's
distribution, averaged over draws and prompts. Each probe gives one number per layer, and a z-score over the layers:

=============  =============================================================================  ==========  ======
probe          number                                                                          suspicious  weight
=============  =============================================================================  ==========  ======
monotonicity   rho^2, Spearman, of response against scale                                      low         1.0
smoothness     |s_i - (s_(i-1) + s_(i+1)) / 2|, s = log(mean response + 1e-9)                  high        1.5
invariance     std / mean over prompts, of the response at one scale                           high        1.0
compression    slope of a line through response against scale                                  low         1.5
=============  =============================================================================  ==========  ======

    score = max(0, -z_monotonicity) + 1.5 max(0, z_smoothness) + max(0, z_invariance) + 1.5 max(0, -z_compression)

The method has no threshold: it names a layer on a healthy model too. So the verdict is "undecided", always; how often
its first suspect is the faulty layer is in the benchmark beside the other locators. `scans` is what can say "healthy".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor, nn

from noisescope import progress
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.injection import Injection
from noisescope.localization.inputs import parts_of
from noisescope.localization.prompts import chosen_layers, last_logits, prompt_ids
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import Prompts
from noisescope.model.loading import Subject
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.sites import Site

Array = NDArray[np.float64]

SCALES = (0.01, 0.02, 0.05, 0.10, 0.15)
TRIALS = 3
PROMPTS, LENGTH = 5, 16
INVARIANCE_SCALE = 0.05  # the measured scale nearest to it is used
WEIGHTS = {"monotonicity": 1.0, "smoothness": 1.5, "invariance": 1.0, "compression": 1.5}
SUSPICIOUS = {"monotonicity": -1, "smoothness": +1, "invariance": +1, "compression": -1}  # which sign of z
CANNOT_SEE = (
    "this method has no threshold: it names a first suspect even on a healthy model, so its verdict is always "
    "undecided",
    "this method compares how the last token's distribution responds to noise in each layer. It misses faults that "
    "leave those responses unchanged (noise, spikes, saturation, small gains, one wrong channel, anything outside "
    "the blocks, decode, gradients) and may name a layer that is merely sensitive. `audit` detects these faults",
)
_EPS = 1e-6  # in the logarithms of the divergence, in float32
_TINY = 1e-10
_FLAG = 2.0  # |z| beyond which the notes call a layer anomalous; it takes no part in the score


@dataclass(frozen=True)
class Responses:
    """Divergences [layers, scales, trials, prompts] in nats."""

    values: Array
    scales: tuple[float, ...]
    layers: tuple[int, ...]
    forwards: int

    @property
    def by_scale(self) -> Array:
        """[layers, scales]"""
        return np.asarray(self.values.mean((2, 3)))


def srdd(
    subject: Subject | nn.Module,
    *,
    prompts: Sequence[Any] | None = None,
    seed: int = 0,
    layers: Iterable[int] | None = None,
    scales: Sequence[float] = SCALES,
    trials: int = TRIALS,
) -> Verdict:
    """Rank a model's layers by the original notes' composite score; details hold every probe's number.

        with faulty(subject.model, "dead_zone:0.3@10"):
            srdd(subject).suspects[0].site.place

    `prompts` are texts or token ids (default: five beginnings of built-in paragraphs). Noise and built-in prompts
    depend on `seed` alone; the caller's random state is left as it was. It costs scales x trials forwards per layer.
    """
    model, tokenizer, anatomy = parts_of(subject)
    chosen = chosen_layers(layers, len(anatomy.blocks))
    if len(chosen) < 3:
        raise InvalidInput(f"srdd compares layers with one another and needs at least 3, got {len(chosen)}")
    if len(scales) < 2 or any(b <= a for a, b in itertools.pairwise(scales)) or scales[0] <= 0:
        raise InvalidInput(f"scales must be two or more positive numbers in increasing order, got {tuple(scales)}")
    if trials < 1:
        raise InvalidInput(f"trials must be at least 1, got {trials}")
    ids = prompt_ids(model, tokenizer, prompts, seed=seed, count=PROMPTS, length=LENGTH)
    with progress.plan(progress.Phase("layers probed", len(chosen))):
        try:
            responses = _measure(model, anatomy, ids, chosen, tuple(scales), trials, seed)
        except NothingInjected as error:  # a block without a product, as where its forward was replaced
            return Verdict("undecided", "srdd", forwards=1.0, notes=(f"a layer can't be probed: {error}",))
    if responses is None:
        note = "the logits without injected noise are not finite, so there is no response to measure"
        return Verdict("undecided", "srdd", forwards=1.0, notes=(note,))
    found = probes(responses)
    suspects = ranked(_suspect(anatomy, at, layer, found, responses) for at, layer in enumerate(chosen))
    return Verdict("undecided", "srdd", suspects, {}, float(responses.forwards), 4 * len(chosen), CANNOT_SEE)


def probes(responses: Responses) -> dict[str, tuple[Array, Array]]:
    """Each probe's value and z-score per layer."""
    mean = responses.by_scale
    nearest = int(np.argmin(np.abs(np.array(responses.scales) - INVARIANCE_SCALE)))
    by_prompt = responses.values[:, nearest].mean(1)
    smoothness = _second_difference(np.log(mean.mean(1) + 1e-9))
    inner = slice(1, -1)  # the ends have one neighbour only: they get no score from this probe
    smooth_z = np.zeros_like(smoothness)
    smooth_z[inner] = _z(smoothness[inner])
    numbers = {
        "monotonicity": np.array([_spearman(responses.scales, row) ** 2 for row in mean]),
        "invariance": by_prompt.std(1) / (by_prompt.mean(1) + _TINY),
        "compression": np.polyfit(np.array(responses.scales), mean.T, 1)[0],
    }
    return {name: (values, _z(values)) for name, values in numbers.items()} | {"smoothness": (smoothness, smooth_z)}


def composite(found: dict[str, tuple[Array, Array]]) -> Array:
    """The notes' weighted sum per layer."""
    parts = [WEIGHTS[name] * np.maximum(0, SUSPICIOUS[name] * z) for name, (_, z) in found.items()]
    return np.asarray(np.sum(parts, axis=0))


def divergence(clean: Tensor, noisy: Tensor) -> Tensor:
    """The notes' KL [P] of logits [P, V]: float32, and 1e-6 in the logarithm; rounding below 0 counts as 0."""
    p, q = torch.softmax(clean.float(), -1), torch.softmax(noisy.float(), -1)
    return (p * ((p + _EPS) / (q + _EPS)).log()).sum(-1).clamp_min(0)


def _measure(
    model: nn.Module,
    anatomy: Anatomy,
    prompts: Prompts,
    layers: tuple[int, ...],
    scales: tuple[float, ...],
    trials: int,
    seed: int,
) -> Responses | None:
    clean, forwards = last_logits(model, prompts)
    if not bool(clean.isfinite().all()):
        return None
    values = np.zeros((len(layers), len(scales), trials, len(prompts)))
    for at, layer in enumerate(progress.track("layers probed", layers)):
        for number, scale in enumerate(scales):
            noise = Injection(
                Gaussian(scale),
                operators=frozenset({"gemm"}),
                layers=frozenset({layer}),
                phases=frozenset({"forward"}),
                seed=seed,
            )
            with inject(model, noise, anatomy=anatomy):
                noisy, more = last_logits(model, prompts * trials)  # trials are rows of one batch: each draws its own
            forwards += more * trials
            divergences = divergence(clean.repeat(trials, 1), noisy)
            values[at, number] = divergences.reshape(trials, len(prompts)).numpy()
    return Responses(np.nan_to_num(values, nan=0.0), scales, layers, forwards)


def _suspect(
    anatomy: Anatomy, at: int, layer: int, found: dict[str, tuple[Array, Array]], responses: Responses
) -> Suspect:
    details: dict[str, Any] = {name: float(values[at]) for name, (values, _) in found.items()}
    details |= {f"{name}_z": float(z[at]) for name, (_, z) in found.items()}
    details["flags"] = sum(SUSPICIOUS[name] * float(z[at]) > _FLAG for name, (_, z) in found.items())
    details["responses"] = dict(zip(map(str, responses.scales), responses.by_scale[at].tolist(), strict=True))
    score = float(composite(found)[at])
    parts = ", ".join(f"{name} {float(values[at]):.3g} (z {float(z[at]):+.1f})" for name, (values, z) in found.items())
    site = Site("residual", layer, anatomy.blocks[layer])
    return Suspect(site, "unknown", 0.0, f"composite score {score:.2f}: {parts}", score, details=details)


def _second_difference(s: Array) -> Array:
    """|s_i - mean of its neighbours|; at the ends, the one neighbour there is."""
    left, right = np.concatenate([s[1:2], s[:-1]]), np.concatenate([s[1:], s[-2:-1]])
    return np.asarray(np.abs(s - (left + right) / 2))


def _spearman(x: Sequence[float], y: Array) -> float:
    """Rank correlation; 0 for a constant response, which is maximally suspicious."""
    if np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def _z(values: Array) -> Array:
    return np.asarray((values - values.mean()) / (values.std() + _TINY) if len(values) else values)
