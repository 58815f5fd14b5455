"""What changed from one stored run to another: every injection that both ran, B minus A.

Model, dtype and device may differ: that is what is compared. Where both measured the same samples, the difference is
taken sample by sample, with the seeds both have: noise is keyed by seed, sample and site, so equal questions met equal
draws, and what is left of the difference is the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import special

from noisescope import stats
from noisescope.diagnosis.change_rows import (
    LOWER_IS_BETTER,
    UNCHANGED,
    AskedDifferently,
    Change,
    ChangeCounts,
    ChangeRow,
    ChangeVerdict,
    ComparedRuns,
    FailedInjection,
    RunChanges,
    RunFacts,
    SeedCounts,
    VerdictWord,
)
from noisescope.diagnosis.context import Array
from noisescope.diagnosis.stored_trials import StoredInjection, StoredRun, label_of, noise_of, order_of, target_of
from noisescope.errors import InvalidInput
from noisescope.jsonform import Json, to_json
from noisescope.stats.multiple_comparisons import Centre, smallest_unpaired, unpaired, unpaired_p

MEASURES = ("score", "generate", "custom")  # those that give a score per sample
Question = tuple[str, StoredInjection | None]  # how it was scored, and what was injected


@dataclass
class Measured:
    """What one run measured of one injection: values by seed, sample and metric."""

    injection: StoredInjection | None
    data: str  # fingerprint of the samples
    metrics: tuple[str, ...] = ()
    error: str = ""
    values: dict[int, dict[int, dict[str, float | None]]] = field(default_factory=dict)

    def samples(self, seeds: Sequence[int]) -> set[int]:
        """Those measured with every one of the seeds."""
        return set.intersection(*(set(self.values[seed]) for seed in seeds))

    def table(self, metric: str, seeds: Sequence[int], samples: Sequence[int]) -> Array:
        """[samples, seeds], NaN where a value was not finite."""
        rows = [[self.values[seed][sample][metric] for seed in seeds] for sample in samples]
        return np.array(rows, dtype=np.float64).reshape(len(samples), len(seeds))


def compare_runs(a: StoredRun, b: StoredRun) -> ComparedRuns:
    """Both runs' facts, a row for every metric of every injection that both ran, and a verdict."""
    first, second = measured(a), measured(b)
    common = sorted(first.keys() & second.keys(), key=lambda key: order_of(key[1]))
    _check_comparable(a, b, first, second, common)
    failed = [key for key in common if first[key].error or second[key].error]
    custom, score = a.measure == "custom", a.metric if a.metric == b.metric else "accuracy"
    found = [
        _compared(first[key], second[key], metric, order=order, custom=custom)
        for order, key in enumerate(common)
        if key not in failed
        for metric in _metrics(first[key], second[key], score)
    ]
    rows = tuple(sorted(_judged(found, floor=max(a.asked.kl_floor, b.asked.kl_floor)), key=_by_size))
    changes = RunChanges(
        a=RunFacts(**vars(a.asked), name=a.name, trials=len(a.trials), failed=_failures(a)),
        b=RunFacts(**vars(b.asked), name=b.name, trials=len(b.trials), failed=_failures(b)),
        differs=tuple(_differing(to_json(a.asked), to_json(b.asked))),
        metric="custom" if custom else score,
        verdict=_verdict(rows),
        rows=rows,
        failed=tuple(FailedInjection(label_of(key[1]), first[key].error, second[key].error) for key in failed),
        only_in_a=_labels(first, without=common),
        only_in_b=_labels(second, without=common),
        notes=tuple(_notes(a, b, rows)),
    )
    return ComparedRuns(comparison=changes)


def measured(run: StoredRun) -> dict[Question, Measured]:
    """Values by question: the injection without its seed, and how it was scored."""
    found: dict[Question, Measured] = {}
    for trial in run.answers if run.measure in MEASURES else ():
        data = trial.data if trial.texts is None else trial.texts
        entry = found.setdefault((trial.question, trial.injection), Measured(trial.injection, data))
        entry.error = entry.error or trial.result.error
        entry.metrics = entry.metrics or tuple(trial.result.values)
        column = entry.values.setdefault(trial.seed, {})
        for place, sample in enumerate(trial.result.samples):
            column[sample] = {name: values[place] for name, values in trial.result.values.items()}
    return found


def _check_comparable(
    a: StoredRun,
    b: StoredRun,
    first: Mapping[Question, Measured],
    second: Mapping[Question, Measured],
    common: Sequence[Question],
) -> None:
    """Raise where two runs can't be compared, with what to do about it."""
    for run, found in ((a, first), (b, second)):
        if not found:
            raise InvalidInput(f"{run.name} has measured nothing yet. Finish it: noisescope runs resume {run.name}")
    if a.measure != b.measure:
        raise InvalidInput(
            f"{a.name} was measured by {a.measure!r} and {b.name} by {b.measure!r}, which are different scores: run "
            f"both with --generate, or both without it"
        )
    noisy = any(injection is not None for found in (first, second) for _, injection in found)
    if not common or (noisy and all(injection is None for _, injection in common)):
        has = [", ".join(_labels(found)[:3]) or "no injection" for found in (first, second)]
        raise InvalidInput(
            f"{a.name} and {b.name} have no injection in common: the first has {has[0]} ..., the second {has[1]} ... "
            "Run both with the same --noise-scale, --operators, --window, --step, --level and --effort"
        )


def _metrics(first: Measured, second: Measured, score: str) -> Iterator[str]:
    """The score, and beside it what shows changes too small to alter an answer."""
    both = set(first.metrics) & set(second.metrics)
    if first.injection is not None:
        yield from (metric for metric in (score, "kl") if metric in both)
        return
    yield "accuracy" if score == "agreement" else score  # the clean model always agrees with itself
    if "nll" in both and first.data == second.data:  # over other tokens it is another thing
        yield "nll"


@dataclass(frozen=True)
class _Sides:
    """The values of both runs [samples, seeds]; of the same samples if they are paired."""

    x: Array
    y: Array
    paired: bool
    median: bool
    left_out: int

    @property
    def centre(self) -> Centre:
        return stats.median if self.median else stats.mean


def _compared(first: Measured, second: Measured, metric: str, *, order: int, custom: bool) -> tuple[ChangeRow, _Sides]:
    """A row that is not judged yet, and its values: paired if the samples are the same."""
    seeds = sorted(first.values.keys() & second.values.keys())
    used = [seeds or sorted(side.values) for side in (first, second)]
    sides = _sides(first, second, used, metric, custom=custom)
    row = ChangeRow(
        order=order,
        metric="custom" if custom else metric,
        statistic="median" if sides.median else "mean",
        paired=sides.paired,
        left_out=sides.left_out,
    )
    if first.injection is not None:
        row = replace(
            row,
            label=label_of(first.injection),
            target=target_of(first.injection),
            noise=noise_of(first.injection),
            operators=first.injection.operators,
            layers=first.injection.layers,
            places=tuple(map(str, first.injection.places)),
            seeds=SeedCounts(len(used[0]), len(used[1]), len(seeds)),
        )
    if len(sides.x) and len(sides.y):
        difference, p = _difference(sides)
        row = replace(
            row,
            a=sides.centre(sides.x, 0.95),
            b=sides.centre(sides.y, 0.95),
            difference=difference,
            identical=sides.paired and np.array_equal(sides.x, sides.y),
            p=p,
        )
    return row, sides


def _sides(first: Measured, second: Measured, used: Sequence[Sequence[int]], metric: str, *, custom: bool) -> _Sides:
    both = (first, second)
    known = [side.samples(chosen) for side, chosen in zip(both, used, strict=True)]
    shared = known[0] & known[1] if first.data == second.data else set()
    x, y = (
        side.table(metric, chosen, sorted(shared or own)) for side, chosen, own in zip(both, used, known, strict=True)
    )
    lost = 0
    if metric in LOWER_IS_BETTER or custom:
        kept = [np.isfinite(values).all(axis=1) for values in (x, y)]
        kept = [kept[0] & kept[1]] * 2 if shared else kept
        lost = int(max(np.count_nonzero(~k) for k in kept))
        x, y = x[kept[0]], y[kept[1]]
    else:
        x, y = np.nan_to_num(x), np.nan_to_num(y)  # a broken answer is a wrong one
    return _Sides(x, y, bool(shared), metric == "kl", lost)


def _difference(sides: _Sides) -> tuple[stats.Estimate, float]:
    """B minus A with its interval, and p of "no difference"."""
    x, y = sides.x, sides.y
    if not sides.paired:
        return unpaired(x, y, centre=sides.centre), unpaired_p(x, y, centre=sides.centre)
    if not sides.median:
        return stats.difference(y, x), stats.p_no_difference(x, y)
    changes = y.mean(axis=1) - x.mean(axis=1)
    return stats.median(changes), sign_test(changes)


def sign_test(changes: Array) -> float:
    """Two-sided p of "the median change is 0", exactly where the interval of `stats.median` leaves 0 out.

    A change of exactly 0 speaks for no side.
    """
    n = len(changes)
    least = min(int(np.count_nonzero(changes <= 0)), int(np.count_nonzero(changes >= 0)))
    return min(1.0, 2 * float(special.bdtr(least, n, 0.5)))


def _judged(found: Sequence[tuple[ChangeRow, _Sides]], *, floor: float) -> list[ChangeRow]:
    """Holm's correction over all rows, and each row's verdict. A KL below `floor` can't be distinguished from 0."""
    p_values = [row.p for row, _ in found if row.p is not None]
    corrected, comparisons = iter(stats.holm(p_values)), len(p_values)
    rows = []
    for row, sides in found:
        if row.p is not None:
            if sides.paired and not sides.median:
                smallest = stats.smallest_detectable(sides.x, sides.y, comparisons=comparisons)
            else:
                smallest = smallest_unpaired(row.difference, comparisons)
            row = replace(row, p_corrected=next(corrected), smallest_detectable=smallest)
        rows.append(replace(row, verdict=_change(row, floor)))
    return rows


def _change(row: ChangeRow, floor: float) -> Change:
    change = row.difference.value
    if change is None:
        return "not measurable"
    if not row.significant or (row.metric == "kl" and abs(change) <= floor):
        return UNCHANGED
    return "worse" if (change < 0) != (row.metric in LOWER_IS_BETTER) else "better"


def _by_size(row: ChangeRow) -> tuple[int, int, float]:
    """Significant changes first; scores before nats, which are another unit; the largest first."""
    rank = 0 if row.changed else 1 if row.verdict == UNCHANGED else 2
    unit = ("nll", "kl").index(row.metric) + 1 if row.metric in LOWER_IS_BETTER else 0
    return rank, unit, -abs(row.difference.value or 0.0)


def _counts(rows: Sequence[ChangeRow]) -> ChangeCounts:
    verdicts = [row.verdict for row in rows]
    return ChangeCounts(
        verdicts.count("worse"), verdicts.count("better"), verdicts.count("not measurable"), len(verdicts)
    )


def _verdict(rows: Sequence[ChangeRow]) -> ChangeVerdict:
    """By the rows that could be measured; the clean model's own rows count like any other."""
    total = _counts(rows)
    names = dict.fromkeys(row.metric for row in rows)
    metrics = {metric: _counts([row for row in rows if row.metric == metric]) for metric in names}
    word: VerdictWord = UNCHANGED if total.undecided < total.comparisons else "undecided"
    if total.worse or total.better:
        word = "mixed" if total.worse and total.better else "worse" if total.worse else "better"
    return ChangeVerdict(word, **vars(total), metrics=metrics)


def _labels(found: Mapping[Question, Measured], *, without: Sequence[Question] = ()) -> tuple[str, ...]:
    """Injections in order, those of `without` left out."""
    left = [key[1] for key in found if key not in without and key[1] is not None]
    return tuple(label_of(injection) for injection in sorted(left, key=order_of))


def _failures(run: StoredRun) -> int:
    return sum(trial.result.failed for trial in run.trials)


def _differing(a: Mapping[str, Json], b: Mapping[str, Json], before: str = "") -> Iterator[AskedDifferently]:
    """What was asked differently, by dotted name."""
    for name, x in a.items():
        y, where = b[name], f"{before}{name}"
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differing(x, y, f"{where}.")
        elif x != y and where not in ("model.notes", "conditions.model"):  # the model's fingerprint stands there twice
            yield AskedDifferently(where, x, y)


def _notes(a: StoredRun, b: StoredRun, rows: Sequence[ChangeRow]) -> Iterator[str]:
    """What a reader must know to interpret the rows."""
    if rows and all(row.identical for row in rows):
        yield "all values present in both runs are identical, bit for bit"
    apart = [row for row in rows if not row.paired]
    if apart:
        how = "no row is" if len(apart) == len(rows) else f"{len(apart)} of {len(rows)} rows are not"
        yield (
            f"{how} paired: the runs did not measure the same samples, so variation between samples widens every "
            f"interval. Use the same --data, --samples, --max-tokens and tokenizer to pair them"
        )
    if all(row.clean for row in rows):
        yield "neither run injected noise: only the clean models are compared (--effort standard injects)"
    seeds = [row.seeds for row in rows if row.seeds is not None]
    if seeds and not any(count.common for count in seeds):
        yield "the runs have no seed in common: each had its own noise, which widens the intervals"
    if a.asked.conditions.engine != b.asked.conditions.engine:
        yield "the runs were made by different versions of the noise engine: the same seed drew different noise"
    if a.metric != b.metric:
        yield f"the runs had different metrics ({a.metric} and {b.metric}): accuracy is compared"
    lost = max((row.left_out for row in rows), default=0)
    if lost:
        yield f"up to {lost} samples per row were excluded because a value was not finite"
