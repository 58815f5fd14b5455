"""What can be measured in a trial, each as (bench, trial) -> result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.probe.capture import Capture
from noisescope.probe.inject import inject
from noisescope.runs.batches import Batch, Material
from noisescope.runs.gather import Gathered, tokens_compared
from noisescope.runs.screens import formats, screen, site_facts, site_order
from noisescope.tasks import generation
from noisescope.tasks.answers import answers_match
from noisescope.trials import Result, Slice, Trial

if TYPE_CHECKING:
    from noisescope.runs.bench import Bench, Finish


def score(bench: Bench, trial: Trial) -> Finish:
    """Teacher-forced: every scored token of every sample, clean against noisy, in one forward."""
    part = trial.slice
    gathered = Gathered(bench.materials[part.data], part)
    if trial.injection is None:
        clean = bench.clean(part)
        for batch, pieces in zip(clean.batches, clean.logits, strict=True):
            for piece, logits in zip(batch.pieces, pieces, strict=True):
                gathered.add(piece, tokens_compared(piece, logits, None))
        return lambda: Result(*gathered.settle())
    counted = 0  # in one forward: how many forwards a slice takes is a matter of memory
    for compared in bench.noisy(part, trial.injection):
        counted = counted or compared.probe.tally.forward
        gathered.add(compared.piece, tokens_compared(compared.piece, compared.clean, compared.noisy))
        probe = compared.probe

    def finish() -> Result:
        probe.check()
        return Result(*gathered.settle(), {"injections": counted})

    return finish


def generate(bench: Bench, trial: Trial) -> Result:
    """Greedy generation from the prompts, judged by exact match: the answers a user would see."""
    part = trial.slice
    material = bench.materials[part.data]
    prompts, answers = material.prompts[part.start : part.stop], material.answers[part.start : part.stop]
    samples = tuple(group[0].sample for group in material.encoded.sequences[part.start : part.stop])
    if not prompts:
        raise InvalidInput("there is nothing to generate from: generation needs prompts with answers")
    facts: dict[str, Any] = {}
    write = functools.partial(
        generation.generate,
        bench.model,
        bench.subject.tokenizer,
        list(prompts),
        max_new_tokens=int(trial.settings["max_new_tokens"]),
        batch_size=bench.batch_size(len(prompts)),
        device=bench.device,
        samples=list(samples),
    )
    if trial.injection is None:
        texts = write()
    else:
        probe = inject(bench.model, trial.injection, anatomy=bench.anatomy)
        with probe:
            texts = write(on_batch=lambda names, length: probe.rows(names))
        facts["injections"] = probe.tally.forward
    bench.forwards += len(prompts)  # the prompts; what decoding adds depends on the answers
    right = tuple(float(answers_match(text, answer)) for text, answer in zip(texts, answers, strict=True))
    return Result(samples, {"accuracy": right}, facts)


def custom(bench: Bench, trial: Trial) -> Result:
    """The user's own metric: (model, batches) -> one score per sample, under the trial's noise."""
    if bench.metric is None:
        raise InvalidInput("this trial needs the caller's own metric, which this process does not have")
    part = trial.slice
    groups = bench.materials[part.data].encoded.sequences[part.start : part.stop]
    batches = bench.batches(part)
    if trial.injection is None:
        scores = bench.metric(bench.model, ({"input_ids": batch.ids} for batch in batches))
    else:
        probe = inject(bench.model, trial.injection, anatomy=bench.anatomy)

        def named() -> Any:
            for batch in batches:
                probe.rows(batch.rows)
                yield {"input_ids": batch.ids}

        with probe:
            scores = bench.metric(bench.model, named())
    bench.forwards += sum(len(batch.ids) for batch in batches)
    numbers = [float(s) for s in scores]
    if len(numbers) != len(groups):
        raise InvalidInput(f"the metric gave {len(numbers)} scores for {len(groups)} samples: one per sample is needed")
    return Result(tuple(group[0].sample for group in groups), {"accuracy": tuple(numbers)})


def capture_channels(bench: Bench, trial: Trial) -> Result:
    """Statistics of every channel over the slice, in memory for the channels alone."""
    part = trial.slice
    where = trial.injection
    assert where is not None
    scope = Capture(bench.model, where, "statistics", None, bench.anatomy, quantiles=True)
    count = part.stop - part.start
    stride = -(-count // int(trial.settings.get("quantile_samples", 128)))
    with scope as captured, torch.no_grad():
        for batch in bench.batches(part, size=int(trial.settings.get("batch", 16)), whole=True):
            scope.tokens(_real_tokens(bench.materials[part.data], part, batch))
            scope.quantile_rows((batch.rows % (1 << 40)) % stride == 0)
            bench.forward(batch)
            bench.forwards += len(batch.ids)
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


def loss_of(bench: Bench, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of the scored tokens."""
    logits = bench.forward(batch)
    piece = batch.whole
    picked = logits.index_select(0, piece.scored.to(logits.device))
    return torch.nn.functional.cross_entropy(picked.float(), piece.targets.to(picked.device))


def _only(batches: list[Batch]) -> Batch:
    """A second derivative is of all samples at once: a part of them would be another number."""
    if len(batches) != 1:
        raise InvalidInput("out of memory: gradients and curvature need their few samples in one batch")
    return batches[0]


def block_parameters(bench: Bench) -> dict[str, list[torch.nn.Parameter]]:
    """Weights of each block by its index as text."""
    modules = dict(bench.model.named_modules())
    return {
        str(index): [p for p in modules[name].parameters() if p.dim() >= 2]
        for index, name in enumerate(bench.anatomy.blocks)
    }


def curvature(bench: Bench, trial: Trial) -> Result:
    """Hessian trace of the loss with respect to each block's weights, with an interval."""
    from noisescope.metrics.curvature import hessian_traces

    batch = _only(bench.batches(trial.slice, whole=True))
    traces = hessian_traces(
        bench.model,
        lambda model: loss_of(bench, batch),
        block_parameters(bench),
        probes=int(trial.settings["probes"]),
        method=str(trial.settings.get("method", "hutchinson")),
        seed=int(trial.settings["seed"]),
    )
    facts = {
        name: {"trace": t.trace, "low": t.low, "high": t.high, "per_parameter": t.per_parameter, "probes": t.probes}
        for name, t in traces.items()
    }
    return Result((), {}, {"traces": facts})


def gradients(bench: Bench, trial: Trial) -> Result:
    """Norm of the loss gradient in each block's weights, clean or under the trial's noise (both phases)."""
    from noisescope.metrics.curvature import gradient_norms

    batch = _only(bench.batches(trial.slice, whole=True))
    groups = block_parameters(bench)
    if trial.injection is None:
        norms = gradient_norms(bench.model, lambda model: loss_of(bench, batch), groups)
    else:
        probe = inject(bench.model, trial.injection, anatomy=bench.anatomy)
        with probe:
            probe.rows(batch.rows)
            norms = gradient_norms(bench.model, lambda model: loss_of(bench, batch), groups)
    return Result((), {}, {"norms": norms})


MEASURES: dict[str, Callable[[Bench, Trial], Result | Finish]] = {
    "score": score,
    "generate": generate,
    "custom": custom,
    "screen": screen,
    "capture": capture_channels,
    "curvature": curvature,
    "gradients": gradients,
    "formats": formats,
}
