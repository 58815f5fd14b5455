"""Measures that listen to gradients: the Fisher screen, and what number formats would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from noisescope.metrics.fisher import Listener, Screen
from noisescope.quantisation.formats import effective_bits, weight_format
from noisescope.quantisation.scores import FormatScreen, block_parameters, weight_of
from noisescope.runs.batches import Material
from noisescope.sites import Site, place_order
from noisescope.trials import Result, Slice, Trial

if TYPE_CHECKING:
    from noisescope.runs.bench import Bench

SCREEN_PARTS = 9  # a slice is screened in so many batches: gradients need every activation at once
FORMAT_SAMPLES = 8  # rounding errors are projected on the gradients of so many samples at once


def screen(bench: Bench, trial: Trial) -> Result:
    """Fisher sums of every site: see metrics/fisher.py. They are for noise of scale 1 and summed over scored tokens."""
    assert trial.injection is not None
    part = trial.slice
    scope = Screen(bench.model, trial.injection, anatomy=bench.anatomy)
    tokens = _listen(bench, scope, trial, size=max(1, (part.stop - part.start) // SCREEN_PARTS))
    return _screen_result(scope, bench.materials[part.data], part, tokens, int(trial.settings["draws"]))


def _listen(bench: Bench, scope: Listener, trial: Trial, *, size: int) -> dict[int, int]:
    """Send random gradients back through every batch of a slice; scored tokens of each sample."""
    draws, seed = int(trial.settings["draws"]), int(trial.settings["seed"])
    tokens: dict[int, int] = {}
    with scope, torch.enable_grad():
        for batch in bench.batches(trial.slice, size=size, whole=True):
            scope.samples = batch.rows
            scope.tokens = torch.bincount(batch.whole.sequences, minlength=len(batch.ids))
            logits = bench.forward(batch)
            scored, keys = batch.whole.scored.to(logits.device), batch.whole.keys.to(logits.device)
            scope.score(logits, scored, keys, draws=draws, seed=seed)
            del logits
            bench.forwards += len(batch.ids) * (1 + draws)  # a backward through activations alone costs a forward
            for owner in batch.whole.owners.tolist():
                tokens[owner] = tokens.get(owner, 0) + 1
    return tokens


def _screen_result(scope: Screen, material: Material, part: Slice, tokens: dict[int, int], draws: int) -> Result:
    groups = material.encoded.sequences[part.start : part.stop]
    samples = tuple(group[0].sample for group in groups)
    position = {sample: i for i, sample in enumerate(samples)}
    sites = sorted(scope.sums, key=site_order)
    table = np.zeros((len(sites), len(samples)))
    channels: list[np.ndarray] = []
    for row, site in enumerate(sites):
        sums = scope.sums[site]
        for name, value in sums.samples.items():
            table[row, position[name % (1 << 40)]] += value / draws
        channels.append((sums.channels / draws).float().cpu().numpy())
    counted = np.array([tokens[i] for i in range(len(samples))], dtype=np.float64)
    facts = {"sites": [site_facts(site, len(c)) for site, c in zip(sites, channels, strict=True)], "draws": draws}
    facts["lost"] = sorted(str(site) for site in scope.lost)
    arrays = {"sums": table, "tokens": counted, "channels": np.concatenate(channels)}
    return Result(samples, {}, facts, arrays)


def formats(bench: Bench, trial: Trial) -> Result:
    """Predicted KL of each weight format at each linear of the blocks: see quantisation/scores.py."""
    part = trial.slice
    names = [str(name) for name in trial.settings["formats"]]
    scope = FormatScreen(bench.model, {name: weight_format(name) for name in names}, anatomy=bench.anatomy)
    tokens = _listen(bench, scope, trial, size=FORMAT_SAMPLES)
    groups = bench.materials[part.data].encoded.sequences[part.start : part.stop]
    samples = tuple(group[0].sample for group in groups)
    position = {sample: i for i, sample in enumerate(samples)}
    sites = sorted(scope.sums, key=site_order)
    predicted = np.zeros((len(sites), len(names), len(samples)))
    for row, site in enumerate(sites):
        for name, total in scope.sums[site].items():
            predicted[row, :, position[name % (1 << 40)]] += total.numpy()
    predicted /= int(trial.settings["draws"]) * np.array([tokens[i] for i in range(len(samples))])
    modules = dict(bench.model.named_modules())
    facts: dict[str, Any] = {
        "modules": [],
        "formats": [[name, weight_format(name).element_bits] for name in names],
        "block_parameters": block_parameters(bench.model, bench.anatomy),
    }
    for site in sites:
        outputs, inputs = weight_of(modules[site.module]).shape
        about = {
            "module": site.module,
            "place": site.place,
            "parameters": outputs * inputs,
            "inputs": inputs,
            "kind": type(modules[site.module]).__name__,
            "effective_bits": {name: effective_bits(name, inputs) for name in names},
        }
        facts["modules"].append(about)
    return Result(samples, {}, facts, {"predicted": predicted})


def site_order(site: Site) -> tuple[Any, ...]:
    return (place_order(site.place), site.module, site.operator, site.occurrence)


def site_facts(site: Site, channels: int) -> dict[str, Any]:
    return {
        "operator": site.operator,
        "place": site.place,
        "module": site.module,
        "component": site.component,
        "occurrence": site.occurrence,
        "channels": channels,
    }
