"""What a trial can measure: functions (runner, trial) -> result, in the table `MEASURES`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from noisescope import progress
from noisescope.data import generation
from noisescope.data.answers import answers_match
from noisescope.errors import InvalidInput
from noisescope.measures.fisher import GradientScreen, Screen
from noisescope.measures.format_costs import (
    Calibrated,
    FormatScreen,
    PerModule,
    count_block_parameters,
    effective_bits,
    for_samples,
    planned_weights,
    weight_format,
)
from noisescope.measures.format_screen import QuestionScreen
from noisescope.measures.format_slopes import FormatSlopes
from noisescope.probe.capture import Capture
from noisescope.probe.formats import Format
from noisescope.probe.inject import Probe, inject
from noisescope.probe.recomputation import Recomputing
from noisescope.probe.watch import selected_by
from noisescope.runs.batches import CHOICE, SampleScores
from noisescope.runs.calibrated_plans import calibrated, squares_for
from noisescope.sites import Site, place_order
from noisescope.trials import Result, Trial

if TYPE_CHECKING:
    from noisescope.runs.trial_runner import Finish, TrialRunner

SCREEN_PARTS = 9  # a slice is screened in so many batches: gradients need every activation at once
LOSS_LOGITS = 1 << 26  # logits whose loss is computed in float32 at once
_NO_TARGET = -100  # of rows that are not scored
HESSIAN_PASSES = 6  # over the model for a product with the Hessian: forward, backward, and a backward of that, twice
FORMAT_SAMPLES = 8  # rounding errors are projected on the gradients of so many samples at once


def score(runner: TrialRunner, trial: Trial) -> Finish:
    """Teacher-forced: every scored token of every sample, clean against noisy, in one forward."""
    part = trial.slice
    scores = SampleScores(runner.materials[part.data], part)
    if trial.injection is None:
        clean = runner.clean(part)
        for batch, pieces in zip(clean.batches, clean.logits, strict=True):
            for piece, logits in zip(batch.pieces, pieces, strict=True):
                scores.add(piece, logits)
        return lambda: Result(*scores.by_sample())
    injection = calibrated(runner, trial.injection)
    probe = Probe(runner.model, injection, anatomy=runner.anatomy, check=False)  # checked in finish(): that waits
    counted = 0  # in one forward: how many forwards a slice takes is a matter of memory
    for piece, before, after in runner.noisy(part, probe):
        counted = counted or probe.tally.forward
        scores.add(piece, before, after)
    read_samples = probe.tally.begin_reading()

    def finish() -> Result:
        read_samples()
        probe.check()
        return Result(*scores.by_sample(), {"injections": counted})

    return finish


@contextlib.contextmanager
def _injecting(runner: TrialRunner, trial: Trial) -> Iterator[Probe | None]:
    """A context with the trial's noise on; None for a clean trial."""
    if trial.injection is None:
        yield None
        return
    probe = inject(runner.model, calibrated(runner, trial.injection), anatomy=runner.anatomy)
    with probe:
        yield probe


def generate(runner: TrialRunner, trial: Trial) -> Result:
    """Greedy generation from the prompts, scored by exact match: the answers a user would see."""
    part = trial.slice
    material = runner.materials[part.data]
    prompts, answers = material.prompts[part.start : part.stop], material.answers[part.start : part.stop]
    samples = material.samples(part)
    if not prompts:
        raise InvalidInput("generation needs prompts with answers")
    with _injecting(runner, trial) as probe:
        texts = generation.generate(
            runner.model,
            runner.subject.tokenizer,
            list(prompts),
            max_new_tokens=int(trial.settings["max_new_tokens"]),
            batch_size=runner.batch_size(len(prompts)),
            device=runner.device,
            samples=list(samples),
            on_batch=None if probe is None else lambda names, length: probe.rows(names),
        )
    runner.forwards += len(prompts)  # the prompts; what decoding adds depends on the answers
    right = tuple(float(answers_match(text, answer)) for text, answer in zip(texts, answers, strict=True))
    return Result(samples, {"accuracy": right}, {} if probe is None else {"injections": probe.tally.forward})


def custom(runner: TrialRunner, trial: Trial) -> Result:
    """The user's own metric: (model, batches) -> one score per sample, under the trial's noise."""
    if runner.metric is None:
        raise InvalidInput("this trial needs the caller's own metric, which this process does not have")
    samples = runner.materials[trial.slice.data].samples(trial.slice)
    batches = runner.batches(trial.slice)
    with _injecting(runner, trial) as probe:

        def inputs() -> Iterator[dict[str, Tensor]]:
            for batch in batches:
                if probe is not None:
                    probe.rows(batch.rows)
                yield {"input_ids": batch.ids}

        scores = runner.metric(runner.model, inputs())
    runner.forwards += sum(len(batch.ids) for batch in batches)
    values = tuple(float(s) for s in scores)
    if len(values) != len(samples):
        raise InvalidInput(f"the metric gave {len(values)} scores for {len(samples)} samples: one per sample is needed")
    return Result(samples, {"accuracy": values})


def screen(runner: TrialRunner, trial: Trial) -> Result:
    """Fisher sums of every site: see measures/fisher.py. They are of noise at scale 1, summed over scored tokens."""
    assert trial.injection is not None
    scope, draws = Screen(runner.model, trial.injection, anatomy=runner.anatomy), int(trial.settings["draws"])
    samples, tokens = _send_gradients(runner, scope, trial, size=_screen_size(trial))
    sites = sorted(scope.sums, key=site_order)
    table = _sums_table([scope.sums[site].samples for site in sites], samples, draws)
    channels = [(scope.sums[site].channels / draws).float().cpu().numpy() for site in sites]
    facts = {
        "sites": [{**site.facts(), "channels": len(c)} for site, c in zip(sites, channels, strict=True)],
        "draws": draws,
        "lost": sorted(str(site) for site in scope.lost),
    }
    return Result(samples, {}, facts, {"sums": table, "tokens": tokens, "channels": np.concatenate(channels)})


def format_screen(runner: TrialRunner, trial: Trial) -> Result:
    """Predicted KL of a number format at every site it may fall on, summed over scored tokens."""
    assert trial.injection is not None
    scope, draws = QuestionScreen(runner.model, trial.injection, anatomy=runner.anatomy), int(trial.settings["draws"])
    samples, tokens = _send_gradients(runner, scope, trial, size=_screen_size(trial))
    sites = sorted(scope.sums, key=site_order)
    table = _sums_table([scope.sums[site] for site in sites], samples, draws)
    facts = {"sites": [site.facts() for site in sites], "draws": draws, "lost": scope.unpredicted(runner.anatomy)}
    return Result(samples, {}, facts, {"sums": table, "tokens": tokens})


def formats(runner: TrialRunner, trial: Trial) -> Result:
    """Predicted KL of each weight format at each linear of the blocks: see measures/format_costs.py."""
    names = [str(name) for name in trial.settings["formats"]]
    asked = {name: for_samples(weight_format(name), trial.slice) for name in names}
    squares = squares_for(runner, asked.values(), trial.slice)
    scope = FormatScreen(runner.model, asked, squares, anatomy=runner.anatomy)
    samples, tokens = _send_gradients(runner, scope, trial, size=FORMAT_SAMPLES)
    position = {sample: at for at, sample in enumerate(samples)}
    sites = sorted(scope.sums, key=site_order)
    predicted = np.zeros((len(sites), len(names), len(samples)))
    for row, site in enumerate(sites):
        for name, total in scope.sums[site].items():
            predicted[row, :, position[name % CHOICE]] += total.numpy()
    predicted /= int(trial.settings["draws"]) * tokens
    modules = dict(runner.model.named_modules())
    facts: dict[str, Any] = {
        "modules": [],
        "formats": [[name, weight_format(name).element_bits] for name in names],
        "block_parameters": count_block_parameters(runner.model, runner.anatomy),
    }
    for site in sites:
        inputs = scope.inputs[site]
        about = {
            "module": site.module,
            "place": site.place,
            "parameters": sum(weight.numel() for weight in planned_weights(modules[site.module])),
            "inputs": inputs,
            "kind": type(modules[site.module]).__name__,
            "effective_bits": {name: effective_bits(name, inputs) for name in names},
        }
        facts["modules"].append(about)
    return Result(samples, {}, facts, {"predicted": predicted})


def _screen_size(trial: Trial) -> int:
    return max(1, _samples(trial) // SCREEN_PARTS)


def _sums_table(rows: Sequence[Mapping[int, float]], samples: Sequence[int], draws: int) -> np.ndarray:
    """[sites, samples], a mean over draws; the parts of a sample (its choices) are added."""
    position = {sample: at for at, sample in enumerate(samples)}
    table = np.zeros((len(rows), len(samples)))
    for row, sums in zip(table, rows, strict=True):
        for name, value in sums.items():
            row[position[name % CHOICE]] += value / draws
    return table


def format_slopes(runner: TrialRunner, trial: Trial) -> Result:
    """KL of a plan, and how it changes with the format of each linear: see measures/format_slopes.py.

    `injection` is the plan, None where all keep 16 bits. Slopes are of the mean over samples of the KL per token.
    """
    part, names = trial.slice, [str(name) for name in trial.settings["formats"]]
    plan = PerModule(()) if trial.injection is None else trial.injection.perturbation
    assert isinstance(plan, PerModule)
    held = {module: fmt for module, fmt in plan.perturbations if isinstance(fmt, (Format, Calibrated))}
    asked = {name: for_samples(weight_format(name), part) for name in names}
    squares = squares_for(runner, asked.values(), part)
    scope = FormatSlopes(runner.model, asked, held, squares, anatomy=runner.anatomy)
    samples = runner.materials[part.data].samples(part)
    divergence, tokens = np.zeros(len(samples)), np.zeros(len(samples))
    for batch in runner.batches(part, size=2 * FORMAT_SAMPLES, whole=True):
        owners = batch.whole.owners
        np.add.at(tokens, owners, 1.0)
        with torch.no_grad():
            logits = runner.forward(batch)
            scored = batch.whole.scored.to(logits.device)
            clean = logits.index_select(0, scored)
        with _injecting(runner, trial) as probe, scope, torch.enable_grad():
            if probe is not None:
                probe.rows(batch.rows)
            weights = torch.from_numpy(1 / (tokens[owners] * len(samples))).to(logits.device, torch.float32)
            found = scope.descend(runner.forward(batch), clean, scored, weights)
        np.add.at(divergence, owners, found.double().cpu().numpy())
        runner.forwards += len(batch.ids) * 3
    slopes = {site.module: found.tolist() for site, found in scope.sums.items()}
    return Result(samples, {"kl": tuple((divergence / tokens).tolist())}, {"slopes": slopes, "formats": names})


def _send_gradients(
    runner: TrialRunner, scope: GradientScreen, trial: Trial, *, size: int
) -> tuple[tuple[int, ...], np.ndarray]:
    """Send random gradients back through every batch of a slice; its samples, and the scored tokens of each."""
    draws, seed = int(trial.settings["draws"]), int(trial.settings["seed"])
    samples = runner.materials[trial.slice.data].samples(trial.slice)
    tokens = np.zeros(len(samples))
    with scope, torch.enable_grad():
        batches = runner.gradient_batches(trial.slice, size)
        scope.backwards = len(batches) * draws
        for batch in batches:
            scope.samples = batch.rows
            scope.tokens = torch.from_numpy(np.bincount(batch.whole.sequences, minlength=len(batch.ids)))
            logits = runner.forward(batch)
            scored, keys = batch.whole.scored.to(logits.device), batch.whole.keys.to(logits.device)
            scope.score(logits, scored, keys, draws=draws, seed=seed)
            del logits
            # A backward through activations alone costs a forward, and computes the blocks again, which costs another.
            runner.forwards += len(batch.ids) * (1 + 2 * draws)
            np.add.at(tokens, batch.whole.owners, 1.0)
    return samples, tokens


def site_order(site: Site) -> tuple[Any, ...]:
    return (place_order(site.place), site.module, site.operator, site.occurrence)


def capture_channels(runner: TrialRunner, trial: Trial) -> Result:
    """Statistics of every channel over the slice, in memory for the channels alone."""
    part = trial.slice
    assert trial.injection is not None
    scope = Capture(runner.model, selected_by(trial.injection), anatomy=runner.anatomy, quantiles=True)
    count = part.stop - part.start
    fits = runner.room.forwards(runner.longest(part), 0)
    stride = -(-count // int(trial.settings.get("quantile_samples", 128)))
    with scope as captured, torch.no_grad():
        size = min(int(trial.settings.get("batch", 16)), fits or count)
        for batch in progress.parts(runner.batches(part, size=size, whole=True)):
            real = torch.arange(batch.ids.shape[1])[None, :] < batch.lengths[:, None]  # no padding
            scope.tokens(real.to(batch.ids.device))
            scope.quantile_rows((batch.rows % CHOICE) % stride == 0)
            runner.forward(batch)
            runner.forwards += len(batch.ids)
    facts: dict[str, Any] = {"sites": []}
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in ("max", "mean", "mean_abs", "std", "q50", "q99")}
    for site in sorted(captured.statistics, key=site_order):
        statistics = captured.statistics[site]
        columns = statistics.columns()
        assert statistics.histogram is not None
        entry = {
            **site.facts(),
            "channels": len(columns["max"]),
            "count": statistics.count,
            "sparsity": statistics.histogram.share_below(1e-6),
            "relative_sparsity": statistics.relative_sparsity(),
        }
        facts["sites"].append(entry)
        for name, column in columns.items():
            arrays[name].append(column.float().cpu().numpy())
    return Result((), {}, facts, {name: np.concatenate(parts) for name, parts in arrays.items()})


def curvature(runner: TrialRunner, trial: Trial) -> Result:
    """Hessian trace of the loss with respect to each block's weights, with an interval."""
    from noisescope.measures.block_curvature import block_hessian_traces
    from noisescope.measures.curvature import hessian_traces

    loss, _ = _loss(runner, trial)
    groups, method = _block_parameters(runner), str(trial.settings.get("method", "hutchinson"))
    asked = {"probes": int(trial.settings["probes"]), "seed": int(trial.settings["seed"])}
    traces = None
    if method == "hutchinson":
        traces = block_hessian_traces(runner.model, runner.anatomy, loss, groups, **asked)
    if traces is None:
        traces = hessian_traces(runner.model, loss, groups, method=method, **asked)
    _check_finite("curvature", (t.trace for t in traces.values()))
    runner.forwards += _samples(trial) * HESSIAN_PASSES * asked["probes"]
    facts = {
        name: {"trace": t.trace, "low": t.low, "high": t.high, "per_parameter": t.per_parameter, "probes": t.probes}
        for name, t in traces.items()
    }
    return Result((), {}, {"traces": facts})


def gradients(runner: TrialRunner, trial: Trial) -> Result:
    """Norm of the loss gradient in each block's weights, clean or under the trial's noise (both phases)."""
    from noisescope.measures.curvature import gradient_norms

    loss, rows = _loss(runner, trial)
    with _injecting(runner, trial) as probe, Recomputing(runner.model, runner.anatomy):
        if probe is not None:
            probe.rows(rows)
        norms = gradient_norms(runner.model, loss, _block_parameters(runner))
    _check_finite("gradient", norms.values())
    runner.forwards += _samples(trial) * 3  # a forward, its blocks again, and backward
    return Result((), {}, {"norms": norms})


def _check_finite(what: str, found: Iterable[float]) -> None:
    if not all(map(math.isfinite, found)):
        raise InvalidInput(f"the {what} of the loss is NaN or infinite on these samples")


def _samples(trial: Trial) -> int:
    return trial.slice.stop - trial.slice.start


def _loss(runner: TrialRunner, trial: Trial) -> tuple[Callable[[Any], Tensor], Tensor]:
    """Mean negative log-likelihood of the slice's scored tokens as a function of the model, and its rows' names.

    A second derivative is of all samples at once: a part of them would be another number.
    """
    part = trial.slice
    batches = runner.batches(part, size=part.stop - part.start, whole=True)
    if len(batches) != 1:
        raise InvalidInput("out of memory: gradients and curvature need all their samples in one batch")
    piece = batches[0].whole

    def loss(model: Any) -> Tensor:
        logits = runner.forward(batches[0])
        targets = torch.full((len(logits),), _NO_TARGET, device=logits.device)
        targets[piece.scored.to(logits.device)] = piece.targets.to(logits.device)
        step = max(1, LOSS_LOGITS // logits.shape[1])
        parts = zip(torch.split(logits, step), torch.split(targets, step), strict=True)
        losses = [checkpoint(_summed_loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(piece.scored)

    return loss, batches[0].rows


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of some rows; computed again in backward, for its float32 copies are larger than the logits."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=_NO_TARGET, reduction="sum")


def _block_parameters(runner: TrialRunner) -> dict[str, list[torch.nn.Parameter]]:
    """Weights of each block by its index as text."""
    modules = dict(runner.model.named_modules())
    return {
        str(index): [p for p in modules[name].parameters() if p.dim() >= 2]
        for index, name in enumerate(runner.anatomy.blocks)
    }


MEASURES: dict[str, Callable[[TrialRunner, Trial], Result | Finish]] = {
    "score": score,
    "generate": generate,
    "custom": custom,
    "screen": screen,
    "capture": capture_channels,
    "curvature": curvature,
    "gradients": gradients,
    "formats": formats,
    "format_screen": format_screen,
    "format_slopes": format_slopes,
}
