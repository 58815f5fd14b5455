"""What changed from one stored run to another: every injection that both ran, side by side, B less A.

Model, dtype and device may differ: that is what is compared. Where both measured the same samples, the difference is
taken sample by sample, with the seeds both have: noise is keyed by seed, sample and site, so equal questions met equal
draws, and what is left of the difference is the model's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noisescope import stats
from noisescope.diagnosis.effects import SURE, Row, estimate
from noisescope.diagnosis.frame import Array
from noisescope.diagnosis.naming import aim_of, noise_of, order_of, places_of, plain
from noisescope.diagnosis.unpaired import smallest_unpaired, unpaired, unpaired_p
from noisescope.errors import InvalidInput
from noisescope.trials import Result

SCHEMA_VERSION = 1
MEASURES = ("score", "generate", "custom")  # those that give a score per sample
LOWER_IS_BETTER = ("kl", "nll")
UNCHANGED = "no difference seen"
CLEAN = "no noise"


@dataclass(frozen=True)
class Run:
    """A stored run: its name, what it asked (the store's `asked`), and its trials as (content, result)."""

    name: str
    asked: Mapping[str, Any]
    trials: Sequence[tuple[Mapping[str, Any], Result]]

    @property
    def measure(self) -> str:
        return str(self.asked["data"]["measure"])

    @property
    def metric(self) -> str:
        """The column that stands for accuracy; the scores of one's own metric are kept under that name, too."""
        return str(self.asked["metric"]) if self.measure == "score" else "accuracy"


@dataclass
class Measured:
    """What one run measured of one injection: values by seed, sample and metric."""

    injection: Mapping[str, Any] | None  # plain values without the seed; None is the clean model
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


def compare_runs(a: Run, b: Run) -> dict[str, Any]:
    """Both runs' facts, a row for every metric of every injection that both ran, and a verdict."""
    first, second = measured(a), measured(b)
    common = sorted(first.keys() & second.keys(), key=lambda key: order_of(first[key].injection))
    _refuse_strangers(a, b, first, second, common)
    failed = [key for key in common if first[key].error or second[key].error]
    custom, score = a.measure == "custom", a.metric if a.metric == b.metric else "accuracy"
    rows = [
        {**_words(first[key].injection), "order": order, **_difference(first[key], second[key], metric, custom=custom)}
        for order, key in enumerate(common)
        if key not in failed
        for metric in _metrics(first[key], second[key], score)
    ]
    _judge(rows, floor=max(float(run.asked.get("kl_floor", 0.0)) for run in (a, b)))
    rows.sort(key=_by_size)
    comparison = {
        "a": _facts(a),
        "b": _facts(b),
        "differs": list(_differing(a.asked, b.asked)),
        "metric": "custom" if custom else score,
        "verdict": _verdict(rows),
        "rows": rows,
        "failed": [
            {"label": _words(first[key].injection)["label"], "a": first[key].error, "b": second[key].error}
            for key in failed
        ],
        "only_in_a": _labels(first, without=common),
        "only_in_b": _labels(second, without=common),
        "notes": list(_notes(a, b, rows)),
    }
    return {"schema_version": SCHEMA_VERSION, "comparison": comparison}


def measured(run: Run) -> dict[str, Measured]:
    """Values by question: the injection without its seed, and how it was scored.

    A folder may hold trials of several models, devices and data sets; the last that was asked for is the run.
    """
    found: dict[str, Measured] = {}
    for content, result in run.trials:
        conditions = {name: value for name, value in content["conditions"].items() if name != "type"}
        data, settings, injection = content["slice"]["data"], dict(content["settings"]), content["injection"]
        if run.measure not in MEASURES or content["measure"] != run.measure or conditions != run.asked["conditions"]:
            continue
        if data != run.asked["data"]["fingerprint"]:
            continue
        data = settings.pop("texts", data)  # of generation: prompts and answers, whatever the tokenizer makes of them
        aim = None if injection is None else {name: plain(v) for name, v in injection.items() if name != "seed"}
        entry = found.setdefault(json.dumps([settings, aim], sort_keys=True), Measured(aim, str(data)))
        entry.error = entry.error or result.error
        entry.metrics = entry.metrics or tuple(result.values)
        column = entry.values.setdefault(0 if injection is None else int(injection["seed"]), {})
        for place, sample in enumerate(result.samples):
            column[sample] = {name: values[place] for name, values in result.values.items()}
    return found


def _refuse_strangers(
    a: Run, b: Run, first: Mapping[str, Measured], second: Mapping[str, Measured], common: Sequence[str]
) -> None:
    """Runs that can't be compared, and what to do about it."""
    for run, found in ((a, first), (b, second)):
        if not found:
            raise InvalidInput(f"{run.name} has measured nothing yet. Finish it: noisescope runs resume {run.name}")
    if a.measure != b.measure:
        raise InvalidInput(
            f"{a.name} was measured by {a.measure!r} and {b.name} by {b.measure!r}, which are different scores: "
            "run both with --generate or both without"
        )
    noisy = any(entry.injection is not None for found in (first, second) for entry in found.values())
    if not common or (noisy and all(first[key].injection is None for key in common)):
        has = [", ".join(_labels(found)[:3]) or "no injection" for found in (first, second)]
        raise InvalidInput(
            f"{a.name} and {b.name} have no injection in common: the first has {has[0]} ..., the second {has[1]} ... "
            "Run both with the same --noise-scale, --operators, --window, --step, --level and --effort"
        )


def _metrics(first: Measured, second: Measured, score: str) -> Iterator[str]:
    """The score, and beside it what shows changes too small to turn an answer."""
    both = set(first.metrics) & set(second.metrics)
    if first.injection is not None:
        yield from (metric for metric in (score, "kl") if metric in both)
        return
    yield "accuracy" if score == "agreement" else score  # the clean model always agrees with itself
    if "nll" in both and first.data == second.data:  # over other tokens it is another thing
        yield "nll"


def _difference(first: Measured, second: Measured, metric: str, *, custom: bool) -> Row:
    """Both sides and B less A, with intervals: paired where the samples are the same."""
    sides = (first, second)
    seeds = sorted(first.values.keys() & second.values.keys())
    used = [seeds or sorted(side.values) for side in sides]
    known = [side.samples(chosen) for side, chosen in zip(sides, used, strict=True)]
    shared = known[0] & known[1] if first.data == second.data else set()
    x, y = (
        side.table(metric, chosen, sorted(shared or own)) for side, chosen, own in zip(sides, used, known, strict=True)
    )
    row: Row = {"metric": "custom" if custom else metric, "paired": bool(shared), "left_out": 0}
    if first.injection is not None:
        row["seeds"] = {"a": len(used[0]), "b": len(used[1]), "common": len(seeds)}
    if metric in LOWER_IS_BETTER or custom:
        kept = [np.isfinite(values).all(axis=1) for values in (x, y)]
        kept = [kept[0] & kept[1]] * 2 if shared else kept
        row["left_out"] = int(max(np.count_nonzero(~k) for k in kept))
        x, y = x[kept[0]], y[kept[1]]
    else:
        x, y = np.nan_to_num(x), np.nan_to_num(y)  # a broken answer is a wrong one
    if not len(x) or not len(y):
        nothing = stats.Estimate(None, None, None, 0, note=stats.NOT_MEASURABLE).to_dict()
        return {**row, "a": nothing, "b": nothing, "difference": nothing}
    nats = metric in LOWER_IS_BETTER  # no interval of theirs goes below 0
    a, b = (
        estimate(values.mean(axis=1), countable=False) if nats else stats.mean(values).to_dict() for values in (x, y)
    )
    row |= {"a": a, "b": b, "_values": (x, y)}
    row["identical"] = bool(shared) and np.array_equal(x, y)
    if shared:
        return {**row, "difference": stats.difference(y, x).to_dict(), "p": stats.p_no_difference(x, y)}
    return {**row, "difference": unpaired(x, y).to_dict(), "p": unpaired_p(x, y)}


# -- verdicts


def _judge(rows: list[Row], *, floor: float) -> None:
    """Holm's correction over all rows, and what each row says. A KL below `floor` can't be told from 0."""
    looked = [row for row in rows if "p" in row]
    for row, corrected in zip(looked, stats.holm([row["p"] for row in looked]), strict=True):
        x, y = row.pop("_values")
        row["p_corrected"] = corrected
        row["smallest_detectable"] = (
            stats.smallest_detectable(x, y, looks=len(looked))
            if row["paired"]
            else smallest_unpaired(row["difference"], len(looked))
        )
    for row in rows:
        change = row["difference"]["value"]
        if change is None:
            row["verdict"] = stats.NOT_MEASURABLE
        elif row["p_corrected"] >= SURE or (row["metric"] == "kl" and abs(change) <= floor):
            row["verdict"] = UNCHANGED
        else:
            row["verdict"] = "worse" if (change < 0) != (row["metric"] in LOWER_IS_BETTER) else "better"


def _by_size(row: Row) -> tuple[int, int, float]:
    """Sure changes first; scores before nats, which are another unit; the largest first."""
    rank = {"worse": 0, "better": 0, UNCHANGED: 1}.get(row["verdict"], 2)
    unit = ("nll", "kl").index(row["metric"]) + 1 if row["metric"] in LOWER_IS_BETTER else 0
    return rank, unit, -abs(row["difference"]["value"] or 0.0)


def _verdict(rows: Sequence[Row]) -> Row:
    """All rows in a word; the clean model's own rows count like any other."""
    counts = Counter(row["verdict"] for row in rows)
    worse, better = counts["worse"], counts["better"]
    if worse and better:
        word = "mixed"
    elif worse or better:
        word = "worse" if worse else "better"
    else:
        word = UNCHANGED if counts[UNCHANGED] else stats.NOT_MEASURABLE
    metrics = {
        metric: {
            "worse": sum(row["metric"] == metric and row["verdict"] == "worse" for row in rows),
            "better": sum(row["metric"] == metric and row["verdict"] == "better" for row in rows),
            "looks": sum(row["metric"] == metric for row in rows),
        }
        for metric in dict.fromkeys(row["metric"] for row in rows)
    }
    return {"word": word, "worse": worse, "better": better, "looks": len(rows), "metrics": metrics}


# -- words


def _words(injection: Mapping[str, Any] | None) -> Row:
    if injection is None:
        return {"label": CLEAN, "aim": CLEAN, "noise": "", "operators": None, "layers": [], "places": []}
    aim, noise = aim_of(injection), noise_of(injection)
    layers, places = places_of(injection)
    return {"label": f"{aim} {noise}", "aim": aim, "noise": noise, "operators": injection.get("operators"),
            "layers": layers, "places": places}  # fmt: skip


def _labels(found: Mapping[str, Measured], *, without: Sequence[str] = ()) -> list[str]:
    """Injections in order, those of `without` left out."""
    left = [entry.injection for key, entry in found.items() if key not in without and entry.injection is not None]
    return [_words(injection)["label"] for injection in sorted(left, key=order_of)]


def _facts(run: Run) -> Row:
    return {"name": run.name, **run.asked, "trials": len(run.trials), "failed": sum(r.failed for _, r in run.trials)}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], before: str = "") -> Iterator[Row]:
    """What was asked differently, by dotted name."""
    for name in dict.fromkeys([*a, *b]):
        x, y, where = a.get(name), b.get(name), f"{before}{name}"
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differing(x, y, f"{where}.")
        elif x != y and where not in ("model.notes", "conditions.model"):  # the model's fingerprint stands there twice
            yield {"what": where, "a": x, "b": y}


def _notes(a: Run, b: Run, rows: Sequence[Row]) -> Iterator[str]:
    """What a reader must know to trust the rows."""
    if rows and all(row.get("identical") for row in rows):
        yield "every value that both runs have is the same, to the last bit"
    apart = [row for row in rows if not row["paired"]]
    if apart:
        how = "no row is" if len(apart) == len(rows) else f"{len(apart)} of {len(rows)} rows are not"
        yield (
            f"{how} paired: the runs did not measure the same samples, so what differs between samples adds to every "
            "interval. The same --data, --samples, --max-tokens and tokenizer would pair them"
        )
    if all(row["label"] == CLEAN for row in rows):
        yield "neither run injected noise: only the clean models are compared (--effort standard injects)"
    seeds = [row["seeds"] for row in rows if "seeds" in row]
    if seeds and not any(s["common"] for s in seeds):
        yield "the runs have no seed in common: each met its own noise, which widens the intervals"
    if a.asked["conditions"]["engine"] != b.asked["conditions"]["engine"]:
        yield "the runs were made by different versions of the noise engine: the same seed drew different noise"
    if a.metric != b.metric:
        yield f"the runs had different metrics ({a.metric} and {b.metric}): accuracy is compared"
    lost = max((row["left_out"] for row in rows), default=0)
    if lost:
        yield f"up to {lost} samples a row are left out: a value of theirs was not finite"
