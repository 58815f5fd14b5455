"""Decides whether a model got worse than its baseline, from the numbers that a diagnosis keeps of both.

What is compared is the typical log KL of a sample (the mean without a fifth at either end), as a ratio of KLs: a few
samples with a large KL would dominate a plain mean, see stats/typical.py. Per row the model fails where the ratio is
above the limit (1.2) and its interval excludes 1: a difference within noise is not a regression, however large.
Intervals
hold for all rows together (Bonferroni). Where a ratio twice as far from 1 as the limit (1.4) could have been missed,
and the interval does not end below the limit (1.2) either, the row is undecided: a gate without power says so.

Two limits are absolute, and decided by the whole interval: how much of the score noise may cost, and what the score
without
noise may have lost since the baseline.

The verdict is "fail" where a row fails, else "pass" where a row that compares the model passes; it is undecided only
where none of them decides. Samples that both measured are compared pair by pair, others as two independent sets.

Refused are another architecture, data of another kind, and other samples unless the caller says that they come from the
same source: what differs then is not the model alone. Another dtype, device, attention path, noise engine or number of
seeds is reported beside the verdict: people move models between these, and want to know the effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Array
from noisescope.diagnosis.gate_baseline import CLEAN
from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts, Run
from noisescope.diagnosis.section_types import GateNumbers
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS, metric_name, percent
from noisescope.findings.finding import counted, span
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED, Verdict, at_least, at_most, overall
from noisescope.plans.gate_rows import (
    ConditionsRow,
    Decision,
    Difference,
    DivergenceRow,
    GateRow,
    LimitRow,
    Measure,
    SampleCounts,
    ScoreChange,
    ScoreRow,
)
from noisescope.stats import Estimate
from noisescope.stats.multiple_comparisons import smallest_unpaired, unpaired

MEASURES: dict[Measure, str] = {"predicted_kl": "predicted divergence", "kl": "injected divergence"}
POWER = 0.8  # of what a row says that it would have detected
Pairs = tuple[list[int], list[int]] | None  # the places of the same samples on both sides; None: other samples
_HOPELESS = math.log(1000)  # a ratio that needs no statistics


def decide(
    baseline: GateNumbers,
    candidate: GateNumbers,
    *,
    worse_than: float = LIMITS["gate_worse_than_baseline"],
    max_degradation: float = LIMITS["gate_degradation"],
    kl_floor: float = 1e-10,
) -> Decision:
    """The verdict with every row behind it."""
    refuse_limits(worse_than, max_degradation)
    _refuse_noise(baseline, candidate)
    pairs = pairs_of(baseline.samples, candidate.samples)
    asked = _common(baseline, candidate)
    level = stats.simultaneous_level(len(asked))
    divergence = tuple(
        _divergence(baseline, candidate, of, pairs, level=level, worse_than=worse_than, floor=kl_floor) for of in asked
    )
    limits = _limits(candidate, max_degradation)
    scored = [name for name in candidate.accuracy if name in baseline.accuracy]
    finite, kept = _finite(baseline, candidate), _clean_score(baseline, candidate, pairs, max_degradation)
    losses = [row.degradation.value for row in limits if row.degradation.value is not None]
    return Decision(
        # Finite outputs can only fail a model: they do not show that it is as good.
        verdict=FAIL if finite.verdict == FAIL else overall([row.verdict for row in (*divergence, *limits, kept)]),
        worse_than=worse_than,
        max_degradation_allowed=max_degradation,
        max_degradation=max(losses, default=None),
        worst=max(divergence, key=lambda row: (row.verdict != UNDECIDED, row.ratio.value or 0.0)),
        paired=pairs is not None,
        n=counts_of(baseline.samples, candidate.samples),
        divergence=divergence,
        limits=limits,
        finite=finite,
        clean_score=kept,
        accuracy=tuple(_change(baseline, candidate, name, pairs) for name in scored),
    )


def _common(baseline: GateNumbers, candidate: GateNumbers) -> list[tuple[Measure, str]]:
    """(measure, operator) pairs that both sides have."""
    return [
        (measure, name)
        for measure in MEASURES
        for name in _by_operator(baseline, measure)
        if name in _by_operator(candidate, measure)
    ]


def _by_operator(side: GateNumbers, measure: Measure) -> Mapping[str, tuple[float | None, ...]]:
    return side.predicted_kl if measure == "predicted_kl" else side.kl


def _array(values: tuple[float | None, ...]) -> Array:
    return np.array(values, dtype=np.float64)  # None, for what was not finite, becomes NaN


def refuse_limits(worse_than: float, max_degradation: float) -> None:
    """Reject impossible limits."""
    if not worse_than > 1:
        raise InvalidInput(
            f"the limit is a multiple of the baseline, such as 1.2 (--max-worse 0.2); got {worse_than:g}"
        )
    if not 0 < max_degradation < 1:
        raise InvalidInput(f"--max-degradation must be a share between 0 and 1, such as 0.15; got {max_degradation:g}")


def _refuse_noise(baseline: GateNumbers, candidate: GateNumbers) -> None:
    if baseline.noise != candidate.noise or not _common(baseline, candidate):
        before, now = (
            f"{side.noise} in {', '.join({**side.predicted_kl, **side.kl}) or 'nothing'}"
            for side in (baseline, candidate)
        )
        raise InvalidInput(
            f"the baseline was measured under {before}, this model under {now}: they can't be compared. Create a "
            f"new baseline with noisescope diagnose"
        )


# -- divergence


def _divergence(
    baseline: GateNumbers,
    candidate: GateNumbers,
    of: tuple[Measure, str],
    pairs: Pairs,
    *,
    level: float,
    worse_than: float,
    floor: float,
) -> DivergenceRow:
    """One operator on both sides; samples without a finite KL are excluded."""
    measure, operator = of
    name = f"{MEASURES[measure]}: {operator}"
    x, y = (_array(_by_operator(side, measure)[operator]) for side in (baseline, candidate))
    if pairs is not None:
        x, y = x[pairs[0]], y[pairs[1]]
    known = np.isfinite(x), np.isfinite(y)
    if pairs is not None:
        known = (known[0] & known[1],) * 2
    u, v = (np.log(np.maximum(side[kept], floor)) for side, kept in zip((x, y), known, strict=True))
    left_out = int((~known[0]).sum() + (~known[1]).sum())
    if not len(u) or not len(v):
        ratio = Estimate(None, None, None, 0, note=stats.NOT_MEASURABLE)
        message = "no sample has a finite divergence"
        return DivergenceRow(name, UNDECIDED, message, measure, operator, left_out, None, None, ratio, None)
    shift = stats.trimmed_shift(u, v, paired=pairs is not None)
    logs = shift.estimate(level)
    value, low, high = (None if end is None else math.exp(end) for end in (logs.value, logs.low, logs.high))
    ratio = replace(logs, value=value, low=low, high=high)
    smallest = _smallest(shift, level, worse_than)
    verdict = _verdict(ratio, smallest, worse_than)
    before, now = (float(np.exp(np.median(side))) for side in (u, v))
    message = _ratio_sentence(ratio, smallest, verdict, worse_than)
    return DivergenceRow(name, verdict, message, measure, operator, left_out, before, now, ratio, smallest)


def _smallest(shift: stats.Shift, level: float, worse_than: float) -> float | None:
    """The ratio found with POWER: its interval must exclude 1, and it must pass the limit. None: hardly any."""
    smallest = shift.smallest_detectable(level, POWER)
    if smallest is None or smallest > _HOPELESS:
        return None
    return max(math.exp(smallest), worse_than * math.exp(shift.excess(POWER)))


def _verdict(ratio: Estimate, smallest: float | None, worse_than: float) -> Verdict:
    if ratio.above(1) and ratio.value is not None and ratio.value > worse_than:
        return FAIL
    harmless = ratio.high is not None and ratio.high <= worse_than
    return PASS if harmless or (smallest is not None and smallest <= 2 * worse_than - 1) else UNDECIDED


def _ratio_sentence(ratio: Estimate, smallest: float | None, verdict: Verdict, worse_than: float) -> str:
    words = f"x {ratio.value:.2f} {span(ratio, '.2f')} of the baseline's, limit x {worse_than:g}, n = {ratio.n}"
    if verdict == FAIL:
        return words
    if smallest is None:
        return f"{words}; no ratio could have been detected"
    return f"{words}; {'could only' if verdict == UNDECIDED else 'would'} have detected x {smallest:.2f}"


# -- absolute limits


def _limits(candidate: GateNumbers, limit: float) -> tuple[LimitRow, ...]:
    """What noise costs, operator by operator, against the limit."""
    names = [name for name in candidate.accuracy if name != CLEAN]
    clean, level = _array(candidate.accuracy[CLEAN]), stats.simultaneous_level(len(names))
    rows = []
    for name in names:
        noisy = _array(candidate.accuracy[name])
        loss = stats.degradation(clean, noisy, chance=candidate.chance, level=level)
        check, verdict = f"{metric_name(candidate.metric)} under noise: {name}", at_most(loss, limit)
        rows.append(LimitRow(check, verdict, _limit_sentence(loss, limit, verdict), name, loss, limit))
    return tuple(rows)


def _limit_sentence(loss: Estimate, limit: float, verdict: Verdict) -> str:
    if loss.value is None:
        return f"the cost of noise is {stats.NOT_MEASURABLE}: the clean score is not significantly above chance"
    where = {PASS: "below it", FAIL: "above it", UNDECIDED: "the interval includes it; more --samples would narrow it"}
    words = f"noise costs {percent(loss.value)} {span(loss, '.1f', 100)} of the score"
    return f"{words}, limit {100 * limit:g} %: {where[verdict]}"


def _clean_score(baseline: GateNumbers, candidate: GateNumbers, pairs: Pairs, limit: float) -> ScoreRow:
    """Without noise: a model that lost more than the limit of what its baseline scored fails, robust or not.

    The divergence of a model that answers nothing right may be small.
    """
    name, found = "score without noise", _change(baseline, candidate, CLEAN, pairs)
    before, now, change = found.baseline.value, found.candidate.value, found.difference
    if not before or now is None or change.value is None:
        message = f"the change of the score is {stats.NOT_MEASURABLE}"
        return ScoreRow(name, UNDECIDED, message, limit)
    lowest = -limit * before
    metric = "" if found.metric != "perplexity" else f"{metric_name(found.metric)} "
    message = (
        f"{metric}{found.score(before)} before, {found.score(now)} now ({found.change}), limit "
        f"{found.points(lowest)}; {found.power} would have been detected"
    )
    return ScoreRow(name, at_least(change, lowest), message, limit)


def _change(baseline: GateNumbers, candidate: GateNumbers, name: str, pairs: Pairs) -> ScoreChange:
    """The metric on both sides, with the smallest drop it could have shown."""
    x, y = (_array(side.accuracy[name]) for side in (baseline, candidate))
    if pairs is None:
        change = unpaired(x, y)
        smallest = smallest_unpaired(change, 1, power=POWER)
    else:
        x, y = x[pairs[0]], y[pairs[1]]
        change = stats.difference(y, x)
        smallest = stats.smallest_detectable(x, y, power=POWER)
    return ScoreChange(name, stats.mean(x), stats.mean(y), change, smallest, candidate.metric)


def _finite(baseline: GateNumbers, candidate: GateNumbers) -> GateRow:
    count = candidate.nonfinite
    bad = count > 0 and not baseline.nonfinite
    message = f"{counted(count, 'token')} not finite" + ("; all were finite in the baseline" if bad else "")
    return GateRow("finite outputs", FAIL if bad else PASS, message)


# -- whether a model may be compared with a baseline, and under which conditions both were measured


def pairs_of(first: Sequence[str], second: Sequence[str]) -> Pairs:
    """Where the smaller set of samples lies in the larger; None unless it is a subset."""
    places = [{name: at for at, name in enumerate(names)} for names in (first, second)]
    common = [name for name in places[0] if name in places[1]]
    if len(common) < min(map(len, places)):
        return None
    return [places[0][name] for name in common], [places[1][name] for name in common]


def refuse_architecture(model: ModelFacts, architecture: str, blocks: int) -> None:
    """Reject a model of another kind, or of another depth, than the report's."""
    if (model.architecture, model.blocks) != (architecture, blocks):
        raise InvalidInput(
            f"the report describes {model.architecture} with {model.blocks} blocks, but this model is {architecture} "
            f"with {blocks}: they can't be compared. Create a report for this one: noisescope diagnose MODEL -o DIR"
        )


def refuse_kind(before: DataFacts, now: DataFacts) -> None:
    """Reject data of another kind: their scores and divergences can't be compared."""
    if before.kind != now.kind:
        raise InvalidInput(
            f"the baseline was measured on data of kind {before.kind} ({before.source}), but this is {now.kind} "
            f"({now.source}): they can't be compared. Pass the baseline's data with --data"
        )


def refuse_other_samples(before: Run, now: DataFacts, samples: tuple[Sequence[str], Sequence[str]]) -> None:
    """Samples are identified by their tokens, so another file, tokenizer or length limit gives others."""
    if pairs_of(*samples) is not None:
        return
    shared = len(set(samples[0]) & set(samples[1]))
    cut = None if before.command is None else before.command.options.get("max_tokens")
    limit = "" if cut is None else f" (the baseline has --max-tokens {cut})"
    raise InvalidInput(
        f"{shared} of these {len(samples[1])} samples ({now.source}) are also in the baseline ({before.data.source}), "
        f"so a difference may come from the data. Use the same --data and --max-tokens{limit}, or --other-samples if "
        f"these were drawn from the same source"
    )


def conditions_row(before: Asked, now: Asked, numbers: tuple[GateNumbers, GateNumbers]) -> ConditionsRow:
    """The measurement conditions of both sides, as a check."""
    sides: list[dict[str, str | int]] = [
        {
            "dtype": run.conditions.dtype,
            "device": run.conditions.device,
            "attention": run.conditions.attention,
            "noise engine": run.conditions.engine,
            "seeds": len(side.seeds),
        }
        for run, side in zip((before, now), numbers, strict=True)
    ]
    both = [Difference(name, value, sides[1][name]) for name, value in sides[0].items()]
    unlike = tuple(one for one in both if one.baseline != one.candidate)
    if unlike:
        words = "; ".join(f"{one.what} {one.baseline} before, {one.candidate} now" for one in unlike)
        words += ": a difference may come from that rather than from the model"
    else:
        words = "both " + ", ".join(f"{one.what} {one.baseline}" for one in both)
    counts = counts_of(numbers[0].samples, numbers[1].samples)
    return ConditionsRow("conditions of the baseline", UNDECIDED if unlike else PASS, f"{words}; {counts}", unlike)


def counts_of(before: Sequence[str], now: Sequence[str]) -> SampleCounts:
    """How many samples each side has, and how many of them are compared in pairs."""
    pairs = pairs_of(before, now)
    return SampleCounts(len(before), len(now), 0 if pairs is None else len(pairs[0]))
