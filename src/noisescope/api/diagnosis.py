"""What is sensitive to numerical error, whether that holds, what round-off alone does, and the demo of all steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noisescope import demo
from noisescope.api.plan_trials import add_precision_plan
from noisescope.api.preparation import Prepared, Question, load_subject, prepare_diagnosis, prepare_run, seeds_of
from noisescope.api.reports import end_facts
from noisescope.api.run_cost import Cost
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
from noisescope.data.answers import end_tokens, generate_tokens
from noisescope.data.dataset import read_data
from noisescope.diagnosis import all_levels, findings_check
from noisescope.diagnosis import robustness_curve as curve
from noisescope.diagnosis.context import Settings
from noisescope.diagnosis.report import Cost as Spent
from noisescope.diagnosis.report import Diagnosis, Robustness, Run
from noisescope.errors import InvalidInput
from noisescope.faults.simulator import faulty
from noisescope.localization.locate import locate
from noisescope.measures.rounded_forwards import OPERATORS, RoundoffRuns, ScoredTokens, run_rounded
from noisescope.model.forwards import dtype_of, input_device
from noisescope.model.loading import Subject
from noisescope.options.base import takes_options
from noisescope.options.sensitivity import DiagnoseOptions, RobustnessOptions
from noisescope.options.shared import ExecutionOptions, LoadingOptions, Options, ScoringOptions
from noisescope.plans.migration import rank_places
from noisescope.probe.formats import Format
from noisescope.probe.noise import Gaussian, Rounding
from noisescope.reports.saved_report import DiagnosisReport, LocateSection, Report
from noisescope.runs.store import Store

PROMPT = 16  # tokens of a text that its greedy continuation is generated from, where the data has no prompts
BATCH = 8

UNSEEN = (
    "Modelled is another order of summation with correct rounding. Kernels that compute otherwise on purpose (a KV "
    "cache or products in fewer bits, an approximate exp) differ by more, and so may two checkpoints.",
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
    count = (1 + len(seeds)) * (len(sequences) + texts)
    run = _run(prepared, options, time.perf_counter() - started, count / len(sequences))
    return Report(Roundoff(run=run, roundoff=found, could_not_see=(*prepared.notes, *UNSEEN)))


def measure_band(subject: Subject, sequences: Sequence[Sequence[int]], *, seeds: int = 3) -> RoundoffBand:
    """The band of a model on token ids, all but the first token of each sequence scored.

    band = measure_band(subject, [tokenizer(text)["input_ids"] for text in texts])
    band.judge(gap_between(logprobs_of_a, logprobs_of_b))
    """
    scored = [ScoredTokens(number, tuple(ids), 1) for number, ids in enumerate(sequences)]
    runs = run_rounded(subject.model, scored, seeds=range(seeds), batch=BATCH, anatomy=subject.anatomy, blocks=False)
    return band_of(runs.logprobs, runs.differences, dtype=dtype_of(subject.model))


def _concluded(runs: RoundoffRuns, greedy: GreedyForecast | None, dtype: str) -> RoundoffFound:
    layers: list[Digits] = [
        digits_of(str(block), np.concatenate(errors)) for block, errors in sorted(runs.block_errors.items())
    ]
    return RoundoffFound(
        band=band_of(runs.logprobs, runs.differences, dtype=dtype),
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
    ends = end_tokens(subject.model, subject.tokenizer)
    texts = generate_tokens(
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


def _run(prepared: Prepared, options: RobustnessOptions, seconds: float, forwards: float) -> Run:
    facts = prepared.facts
    eps = torch.finfo(next(p.dtype for p in prepared.subject.model.parameters() if p.is_floating_point())).eps
    settings = replace(
        facts.settings, perturbation=repr(Rounding()), noise_scale=eps, layer_operators=tuple(sorted(OPERATORS))
    )
    cost = Spent(seconds=seconds, trials=0, trials_run_now=0, forwards=forwards)
    ended = end_facts(None, full_paths=options.full_paths)
    return Run(**{**vars(facts), "settings": settings}, cost=cost, notes=(), **ended)


@takes_options(DiagnoseOptions, "data")
def diagnose(subject: Subject, options: DiagnoseOptions) -> Report:
    """Which operators, layers and channels are sensitive to numerical error.

    >>> import noisescope as ns
    >>> report = ns.diagnose(ns.load("demo"), samples=2, effort="screen", level="layer")
    >>> report.value.executive_summary.top_findings[0].component
    'layer 0'
    >>> frame = report.to_frame()  # every row, for pandas; in a notebook `report` alone shows the findings
    >>> paths = report.save("out", formats=["json", "html"])

    With `perturbation="int4"` and the like, what rounding weights, activations or the KV cache (`on`) costs instead.
    With `output` results are stored there as they come, and the same call resumes.
    """
    run, found = prepare_diagnosis(subject, options=options).run(all_levels, options)
    diagnosis = DiagnosisReport.from_diagnosis(Diagnosis.of(run, found))
    by_noise = run.settings.question is None
    if by_noise and diagnosis.layer_analysis is not None and any(row.nats for row in diagnosis.layer_analysis.layers):
        diagnosis = replace(diagnosis, migration_plan=rank_places(diagnosis))
    return _kept(Report(diagnosis), options.output)


def prepare_question(subject: Subject, options: DiagnoseOptions | RobustnessOptions) -> tuple[Prepared, Question[Any]]:
    """What a command asks, and the data that it is asked on."""
    if isinstance(options, DiagnoseOptions):
        return prepare_diagnosis(subject, options=options), all_levels
    levels = curve.checked_levels(options.noise_levels)
    settings = Settings(
        Gaussian(max(levels)), levels=("operator",), layer_operators=options.operators, seeds=seeds_of(options.seeds)
    )
    return prepare_run(subject, options, settings), curve.RobustnessQuestion(levels)


def cost_of_run(subject: Subject, options: DiagnoseOptions | RobustnessOptions) -> Cost:
    """What a run would cost, from one timed sample."""
    prepared, question = prepare_question(subject, options)
    return prepared.cost(question)


@takes_options(RobustnessOptions, "data")
def robustness(subject: Subject, options: RobustnessOptions) -> Report:
    """Accuracy and retention at several noise levels, with intervals; with `rounding`, what round-off alone does.

    >>> import noisescope as ns
    >>> report = ns.robustness(ns.load("demo"), samples=4, seeds=1, noise_levels=(0, 0.05), generate=False)
    >>> report.to_frame()[["noise_level", "accuracy_n"]].values.tolist()
    [[0.0, 4.0], [0.05, 4.0]]
    """
    if options.rounding:
        return _kept(roundoff(subject, options), options.output)
    prepared, question = prepare_question(subject, options)
    run, found = prepared.run(question, options)
    return _kept(Report(Robustness(run=run, **vars(found))), options.output)


def check_findings(
    subject: Subject,
    report: Report,
    data: Any,
    fault: Any,
    *,
    name: str | None = None,
    samples: int = 100,
    output: str | Path | None = None,
) -> Report:
    """The report, and whether it was right: one fault in the layers it warns of, and in others.

    `data` must be other samples than the report's. With the report's own `output` its store keeps the new one, too.
    """
    check = findings_check.FaultCheck(name or str(fault), fault, findings_check.chosen_windows(report.diagnosis))
    settings = Settings(Gaussian(0.05), levels=("layer",), seeds=(0,))
    prepared = prepare_run(subject, ScoringOptions(data=data, samples=samples, slice=samples), settings)
    _, found = prepared.run(check, ExecutionOptions())
    return _kept(Report(replace(report.diagnosis, check=found)), output)


def add_located_fault(subject: Subject, report: Report, fault: str, *, output: str | Path | None = None) -> Report:
    """The report, and what `locate` says of the model while a simulated fault is in it."""
    with faulty(subject.model, fault, anatomy=subject.anatomy) as scope:
        verdict = locate(subject, quick=True)
    found = LocateSection.of(verdict.to_dict(), simulated=fault, elements_changed=scope.changed)
    return _kept(Report(replace(report.diagnosis, locate=found)), output)


def _kept(report: Report, output: str | Path | None) -> Report:
    """The run's store keeps the report as it is now: `noisescope report` draws it again, without torch."""
    if output is not None:
        with Store(output) as store:
            store.note(report=report.data)
    return report


SAMPLES = 64  # of the demo, with two seeds: enough for a significant avalanche point within a minute
HELD_OUT = 100
BITS = 5
BROKEN = "stuck_bit:bit=16@6/linear/down_proj"  # the fault that the demo simulates, and has to locate
FAULT = "int4"  # 4-bit integers with one scale per tensor


def run_demo(output: Path, announce: Callable[[str], None], *, resumes: str | None = None) -> Report:
    """A diagnosis of the bundled model, its findings checked, its precision planned, and a fault located.

    `announce` gets a line as each step begins.
    """
    problems = read_data(demo.test_file(), limit=SAMPLES + HELD_OUT)
    unseen = replace(problems, items=problems.items[SAMPLES:])
    subject = load_subject(LoadingOptions(model="demo"))
    options = Options(output=output, repeat={"name": "demo", "options": {}}, resumes=resumes)
    report = diagnose(subject, samples=SAMPLES, seeds=2, slice=SAMPLES, calibration_samples=128, options=options)
    announce("2. simulating a fault where the report warns, and where it does not")
    name = "4-bit integers (one scale per tensor)"
    report = check_findings(subject, report, unseen, Format(FAULT), name=name, samples=HELD_OUT, output=output)
    announce(f"3. planning {BITS} bits per weight, and measuring what that costs")
    report = add_precision_plan(subject, report, BITS)
    announce("4. breaking one operation on purpose, and looking for it without a reference")
    return add_located_fault(subject, report, BROKEN, output=output)
