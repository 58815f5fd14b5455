"""Measures that listen to gradients: the Fisher screen, and what number formats would cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from noisescope.data import generation
from noisescope.data.answers import answers_match
from noisescope.errors import InvalidInput
from noisescope.measures.fisher import GradientScreen, Screen
from noisescope.measures.format_costs import (
    FormatScreen,
    count_block_parameters,
    effective_bits,
    weight_format,
)
from noisescope.model.anatomy import linear_weight
from noisescope.probe.capture import Capture
from noisescope.probe.inject import inject
from noisescope.probe.watch import selected_by
from noisescope.runs.batches import Batch, Gathered, Material, tokens_compared
from noisescope.sites import Site, place_order
from noisescope.trials import Result, Slice, Trial

if TYPE_CHECKING:
    from noisescope.runs.runner import Finish, TrialRunner


SCREEN_PARTS = 9  # a slice is screened in so many batches: gradients need every activation at once
FORMAT_SAMPLES = 8  # rounding errors are projected on the gradients of so many samples at once


def screen(runner: TrialRunner, trial: Trial) -> Result:
    """Fisher sums of every site: see measures/fisher.py. They are of noise at scale 1, summed over scored tokens."""
    assert trial.injection is not None
    part = trial.slice
    scope = Screen(runner.model, trial.injection, anatomy=runner.anatomy)
    tokens = _listen(runner, scope, trial, size=max(1, (part.stop - part.start) // SCREEN_PARTS))
    return _screen_result(scope, runner.materials[part.data], part, tokens, int(trial.settings["draws"]))


def _listen(runner: TrialRunner, scope: GradientScreen, trial: Trial, *, size: int) -> dict[int, int]:
    """Send random gradients back through every batch of a slice; scored tokens of each sample."""
    draws, seed = int(trial.settings["draws"]), int(trial.settings["seed"])
    tokens: dict[int, int] = {}
    with scope, torch.enable_grad():
        for batch in runner.batches(trial.slice, size=size, whole=True):
            scope.samples = batch.rows
            scope.tokens = torch.bincount(batch.whole.sequences, minlength=len(batch.ids))
            logits = runner.forward(batch)
            scored, keys = batch.whole.scored.to(logits.device), batch.whole.keys.to(logits.device)
            scope.score(logits, scored, keys, draws=draws, seed=seed)
            del logits
            runner.forwards += len(batch.ids) * (1 + draws)  # a backward through activations alone costs a forward
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


def formats(runner: TrialRunner, trial: Trial) -> Result:
    """Predicted KL of each weight format at each linear of the blocks: see measures/format_costs.py."""
    part = trial.slice
    names = [str(name) for name in trial.settings["formats"]]
    scope = FormatScreen(runner.model, {name: weight_format(name) for name in names}, anatomy=runner.anatomy)
    tokens = _listen(runner, scope, trial, size=FORMAT_SAMPLES)
    groups = runner.materials[part.data].encoded.sequences[part.start : part.stop]
    samples = tuple(group[0].sample for group in groups)
    position = {sample: i for i, sample in enumerate(samples)}
    sites = sorted(scope.sums, key=site_order)
    predicted = np.zeros((len(sites), len(names), len(samples)))
    for row, site in enumerate(sites):
        for name, total in scope.sums[site].items():
            predicted[row, :, position[name % (1 << 40)]] += total.numpy()
    predicted /= int(trial.settings["draws"]) * np.array([tokens[i] for i in range(len(samples))])
    modules = dict(runner.model.named_modules())
    facts: dict[str, Any] = {
        "modules": [],
        "formats": [[name, weight_format(name).element_bits] for name in names],
        "block_parameters": count_block_parameters(runner.model, runner.anatomy),
    }
    for site in sites:
        outputs, inputs = linear_weight(modules[site.module]).shape
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


# What can be measured in a trial, each as (bench, trial) -> result.


def score(runner: TrialRunner, trial: Trial) -> Finish:
    """Teacher-forced: every scored token of every sample, clean against noisy, in one forward."""
    part = trial.slice
    gathered = Gathered(runner.materials[part.data], part)
    if trial.injection is None:
        clean = runner.clean(part)
        for batch, pieces in zip(clean.batches, clean.logits, strict=True):
            for piece, logits in zip(batch.pieces, pieces, strict=True):
                gathered.add(piece, tokens_compared(piece, logits, None))
        return lambda: Result(*gathered.settle())
    counted = 0  # in one forward: how many forwards a slice takes is a matter of memory
    for compared in runner.noisy(part, trial.injection):
        counted = counted or compared.probe.tally.forward
        gathered.add(compared.piece, tokens_compared(compared.piece, compared.clean, compared.noisy))
        probe = compared.probe

    def finish() -> Result:
        probe.check()
        return Result(*gathered.settle(), {"injections": counted})

    return finish


def generate(runner: TrialRunner, trial: Trial) -> Result:
    """Greedy generation from the prompts, judged by exact match: the answers a user would see."""
    part = trial.slice
    material = runner.materials[part.data]
    prompts, answers = material.prompts[part.start : part.stop], material.answers[part.start : part.stop]
    samples = tuple(group[0].sample for group in material.encoded.sequences[part.start : part.stop])
    if not prompts:
        raise InvalidInput("there is nothing to generate from: generation needs prompts with answers")
    facts: dict[str, Any] = {}
    write = functools.partial(
        generation.generate,
        runner.model,
        runner.subject.tokenizer,
        list(prompts),
        max_new_tokens=int(trial.settings["max_new_tokens"]),
        batch_size=runner.batch_size(len(prompts)),
        device=runner.device,
        samples=list(samples),
    )
    if trial.injection is None:
        texts = write()
    else:
        probe = inject(runner.model, trial.injection, anatomy=runner.anatomy)
        with probe:
            texts = write(on_batch=lambda names, length: probe.rows(names))
        facts["injections"] = probe.tally.forward
    runner.forwards += len(prompts)  # the prompts; what decoding adds depends on the answers
    right = tuple(float(answers_match(text, answer)) for text, answer in zip(texts, answers, strict=True))
    return Result(samples, {"accuracy": right}, facts)


def custom(runner: TrialRunner, trial: Trial) -> Result:
    """The user's own metric: (model, batches) -> one score per sample, under the trial's noise."""
    if runner.metric is None:
        raise InvalidInput("this trial needs the caller's own metric, which this process does not have")
    part = trial.slice
    groups = runner.materials[part.data].encoded.sequences[part.start : part.stop]
    batches = runner.batches(part)
    if trial.injection is None:
        scores = runner.metric(runner.model, ({"input_ids": batch.ids} for batch in batches))
    else:
        probe = inject(runner.model, trial.injection, anatomy=runner.anatomy)

        def named() -> Any:
            for batch in batches:
                probe.rows(batch.rows)
                yield {"input_ids": batch.ids}

        with probe:
            scores = runner.metric(runner.model, named())
    runner.forwards += sum(len(batch.ids) for batch in batches)
    numbers = [float(s) for s in scores]
    if len(numbers) != len(groups):
        raise InvalidInput(f"the metric gave {len(numbers)} scores for {len(groups)} samples: one per sample is needed")
    return Result(tuple(group[0].sample for group in groups), {"accuracy": tuple(numbers)})


def capture_channels(runner: TrialRunner, trial: Trial) -> Result:
    """Statistics of every channel over the slice, in memory for the channels alone."""
    part = trial.slice
    where = trial.injection
    assert where is not None
    scope = Capture(runner.model, selected_by(where), anatomy=runner.anatomy, quantiles=True)
    count = part.stop - part.start
    stride = -(-count // int(trial.settings.get("quantile_samples", 128)))
    with scope as captured, torch.no_grad():
        for batch in runner.batches(part, size=int(trial.settings.get("batch", 16)), whole=True):
            scope.tokens(_real_tokens(runner.materials[part.data], part, batch))
            scope.quantile_rows((batch.rows % (1 << 40)) % stride == 0)
            runner.forward(batch)
            runner.forwards += len(batch.ids)
    facts: dict[str, Any] = {"sites": []}
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in ("max", "mean", "mean_abs", "std", "q50", "q99")}
    for site in sorted(captured.statistics, key=site_order):
        statistics = captured.statistics[site]
        assert statistics.maximum is not None and statistics.mean is not None and statistics.mean_abs is not None
        assert statistics.std is not None and statistics.histogram is not None
        entry = site_facts(site, len(statistics.maximum))
        entry["count"] = statistics.count
        entry["sparsity"] = statistics.histogram.share_below(1e-6)
        entry["relative_sparsity"] = statistics.relative_sparsity()
        facts["sites"].append(entry)
        columns = {
            "max": statistics.maximum,
            "mean": statistics.mean,
            "mean_abs": statistics.mean_abs,
            "std": statistics.std,
            "q50": statistics.histogram.quantile(0.5),
            "q99": statistics.histogram.quantile(0.99),
        }
        for name, column in columns.items():
            arrays[name].append(column.float().cpu().numpy())
    return Result((), {}, facts, {name: np.concatenate(parts) for name, parts in arrays.items()})


def _real_tokens(material: Material, part: Slice, batch: Batch) -> Tensor:
    """[B, T] True where there is a token and no padding."""
    lengths = {}
    for group in material.encoded.sequences[part.start : part.stop]:
        for s in group:
            lengths[s.sample + s.choice * (1 << 40)] = len(s.ids)
    rows = torch.tensor([lengths[int(name)] for name in batch.rows])
    mask = torch.arange(batch.ids.shape[1])[None, :] < rows[:, None]
    return mask.to(batch.ids.device)


def loss_of(runner: TrialRunner, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the scored tokens."""
    logits = runner.forward(batch)
    piece = batch.whole
    picked = logits.index_select(0, piece.scored.to(logits.device))
    return torch.nn.functional.cross_entropy(picked.float(), piece.targets.to(picked.device))


def _only(batches: list[Batch]) -> Batch:
    """A second derivative is of all samples at once: a part of them would be another number."""
    if len(batches) != 1:
        raise InvalidInput("out of memory: gradients and curvature need their few samples in one batch")
    return batches[0]


def block_parameters(runner: TrialRunner) -> dict[str, list[torch.nn.Parameter]]:
    """Weights of each block by its index as text."""
    modules = dict(runner.model.named_modules())
    return {
        str(index): [p for p in modules[name].parameters() if p.dim() >= 2]
        for index, name in enumerate(runner.anatomy.blocks)
    }


def curvature(runner: TrialRunner, trial: Trial) -> Result:
    """Hessian trace of the loss with respect to each block's weights, with an interval."""
    from noisescope.measures.curvature import hessian_traces

    batch = _only(runner.batches(trial.slice, whole=True))
    traces = hessian_traces(
        runner.model,
        lambda model: loss_of(runner, batch),
        block_parameters(runner),
        probes=int(trial.settings["probes"]),
        method=str(trial.settings.get("method", "hutchinson")),
        seed=int(trial.settings["seed"]),
    )
    facts = {
        name: {"trace": t.trace, "low": t.low, "high": t.high, "per_parameter": t.per_parameter, "probes": t.probes}
        for name, t in traces.items()
    }
    return Result((), {}, {"traces": facts})


def gradients(runner: TrialRunner, trial: Trial) -> Result:
    """Norm of the loss gradient in each block's weights, clean or under the trial's noise (both phases)."""
    from noisescope.measures.curvature import gradient_norms

    batch = _only(runner.batches(trial.slice, whole=True))
    groups = block_parameters(runner)
    if trial.injection is None:
        norms = gradient_norms(runner.model, lambda model: loss_of(runner, batch), groups)
    else:
        probe = inject(runner.model, trial.injection, anatomy=runner.anatomy)
        with probe:
            probe.rows(batch.rows)
            norms = gradient_norms(runner.model, lambda model: loss_of(runner, batch), groups)
    return Result((), {}, {"norms": norms})


MEASURES: dict[str, Callable[[TrialRunner, Trial], Result | Finish]] = {
    "score": score,
    "generate": generate,
    "custom": custom,
    "screen": screen,
    "capture": capture_channels,
    "curvature": curvature,
    "gradients": gradients,
    "formats": formats,
}
