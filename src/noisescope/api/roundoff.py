"""`robustness` with rounding: what round-off alone does to a model, and how far two healthy systems may differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from noisescope.api.preparation import Prepared, prepare_run, seeds_of
from noisescope.api.reports import end_facts
from noisescope.comparison.roundoff import (
    Digits,
    GreedyForecast,
    Roundoff,
    RoundoffBand,
    RoundoffFound,
    band_of,
    digits_of,
    forecast,
)
from noisescope.data import generation
from noisescope.diagnosis.context import Settings
from noisescope.diagnosis.report import Cost, Run
from noisescope.errors import InvalidInput
from noisescope.measures.rounded_forwards import OPERATORS, Method, RoundoffRuns, ScoredTokens, run_rounded
from noisescope.model.forwards import dtype_of, input_device
from noisescope.model.loading import Subject
from noisescope.options.sensitivity import RobustnessOptions
from noisescope.probe.noise import Gaussian, Rounding
from noisescope.progress import begin
from noisescope.reports.saved_report import Report

PROMPT = 16  # tokens of a text that its greedy continuation is generated from, where the data has no prompts
BATCH = 8

UNSEEN = (
    "Modelled is another order of summation with correct rounding, and in float32 sums about as accurate as this "
    "system's. Kernels that compute otherwise on purpose (a KV cache or products in fewer bits, an approximate exp) "
    "differ by more, and so may two checkpoints.",
    "Greedy texts are followed by forwards over the whole text; decoding token by token rounds alike, but other batch "
    "sizes and scheduling in a serving engine were not run.",
)


def roundoff(subject: Subject, options: RobustnessOptions) -> Report:
    """The round-off band, significant digits per layer, and when greedy texts are expected to differ."""
    started = time.perf_counter()
    seeds = seeds_of(options.seeds)
    if options.executor != "local":
        raise InvalidInput(f"rounding runs in this process; got executor {options.executor}: leave it out")
    prepared = prepare_run(subject, options, Settings(Gaussian(1.0), levels=("operator",), seeds=seeds))
    sequences = [
        ScoredTokens(one.sample, one.ids, 1) for group in prepared.materials[0].encoded.sequences for one in group[:1]
    ]
    runs = run_rounded(subject.model, sequences, seeds=seeds, batch=BATCH, anatomy=subject.anatomy)
    greedy, texts = _greedy(subject, prepared, seeds, options.max_new_tokens)
    found = _concluded(runs, greedy, dtype_of(subject.model))
    count = (1 + len(runs.differences[0])) * (len(sequences) + texts)
    run = _run(prepared, options, time.perf_counter() - started, count / len(sequences), runs.method)
    return Report(Roundoff(run=run, roundoff=found, could_not_see=(*prepared.notes, *UNSEEN)))


def measure_band(
    subject: Subject, sequences: Sequence[Sequence[int]], *, seeds: int = 3, reported: bool = True
) -> RoundoffBand:
    """The band of a model on token ids, all but the first token of each sequence scored.

    `reported`: for log-probabilities as engines report them, computed in float32; False: for those of their logits.

    band = measure_band(subject, [tokenizer(text)["input_ids"] for text in texts])
    band.judge(gap_between(logprobs_of_a, logprobs_of_b))
    """
    scored = [ScoredTokens(number, tuple(ids), 1) for number, ids in enumerate(sequences)]
    runs = run_rounded(
        subject.model, scored, seeds=range(seeds), batch=BATCH, anatomy=subject.anatomy, blocks=False, reported=reported
    )
    return _band(runs, dtype_of(subject.model))


def _band(runs: RoundoffRuns, dtype: str) -> RoundoffBand:
    return band_of(runs.logprobs, runs.differences, dtype=dtype, method=runs.method)


def _concluded(runs: RoundoffRuns, greedy: GreedyForecast | None, dtype: str) -> RoundoffFound:
    layers: list[Digits] = [
        digits_of(str(block), np.concatenate(errors)) for block, errors in sorted(runs.block_errors.items())
    ]
    return RoundoffFound(
        band=_band(runs, dtype),
        layers=tuple(layers),
        logits=digits_of("logits", np.concatenate(runs.logit_errors)),
        greedy=greedy,
    )


def _greedy(
    subject: Subject, prepared: Prepared, seeds: Sequence[int], max_new_tokens: int
) -> tuple[GreedyForecast | None, int]:
    """The forecast, and of how many texts; None for a model that can't generate."""
    if not hasattr(subject.model, "generate"):
        return None, 0
    groups = prepared.materials[0].encoded.sequences
    prompts = [list(one.ids[: one.start if one.start > 1 else min(PROMPT, len(one.ids) - 1)]) for (one, *_) in groups]
    ends = generation.end_tokens(subject.model, subject.tokenizer)
    begin("generating")
    texts = generation.generate_tokens(
        subject.model,
        prompts,
        max_new_tokens=max_new_tokens,
        batch_size=BATCH,
        device=input_device(subject.model),
        ends=ends,
    )
    scored = [
        ScoredTokens(number, (*prompt, *text), len(prompt))
        for number, (prompt, text) in enumerate(zip(prompts, with_ends(texts, ends, max_new_tokens), strict=True))
        if text
    ]
    if not scored:
        return None, 0
    runs = run_rounded(subject.model, scored, seeds=seeds, batch=BATCH, anatomy=subject.anatomy, blocks=False)
    return forecast(runs.flipped, watched=max_new_tokens), len(scored)


def with_ends(texts: list[list[int]], ends: list[int], limit: int) -> list[list[int]]:
    """Texts with the token that ended them: whether to end is a choice on which two systems may differ, too."""
    return [[*text, ends[0]] if ends and len(text) < limit else text for text in texts]


def _run(prepared: Prepared, options: RobustnessOptions, seconds: float, forwards: float, method: Method) -> Run:
    facts = prepared.facts
    eps = torch.finfo(next(p.dtype for p in prepared.subject.model.parameters() if p.is_floating_point())).eps
    settings = replace(
        facts.settings,
        perturbation=repr(Rounding()) if method == "rounding" else method,
        noise_scale=eps,
        layer_operators=tuple(sorted(OPERATORS)),
    )
    cost = Cost(seconds=seconds, trials=0, trials_run_now=0, forwards=forwards)
    ended = end_facts(None, full_paths=options.full_paths)
    return Run(**{**vars(facts), "settings": settings}, cost=cost, notes=(), **ended)
