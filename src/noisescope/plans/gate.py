"""Whether a model got worse than its baseline, from the numbers that diagnosis/gauge.py takes of both.

What is compared is the typical log KL of a sample (the mean without a fifth at either end), as a ratio of KLs: a few
samples with a large KL would rule a plain mean, see stats/trimmed.py. Per row the model fails where the ratio is above
the limit (1.2) and its interval leaves 1 out: a difference within noise is no regression, however large. Intervals hold
for all rows together (Bonferroni). Where a ratio twice as far from 1 as the limit (1.4) could have been missed, and the
interval does not end below the limit (1.2) either, the row is undecided: a gate without power says so.

Two limits are absolute, and fail a model that is surely beyond: what noise may cost of its score, and what the score
without noise may have lost since the baseline.

Samples that both measured are compared pair by pair, others as two independent sets.
"""

from __future__ import annotations

import math

import numpy as np

from noisescope import stats
from noisescope.diagnosis.effects import Row
from noisescope.diagnosis.frame import Array
from noisescope.diagnosis.gauge import CLEAN
from noisescope.diagnosis.unpaired import smallest_unpaired, unpaired
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS, percent
from noisescope.plans.comparable import Pairs, Section, pairs_of, samples_of
from noisescope.plans.words import counted, span

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
MEASURES = {"predicted_kl": "predicted divergence", "kl": "injected divergence"}
POWER = 0.8  # of what a row says that it would have caught
_HOPELESS = math.log(1000)  # a ratio that nobody needs statistics for


def decide(
    baseline: Section,
    candidate: Section,
    *,
    worse_than: float = LIMITS["gate_worse_than_baseline"],
    max_degradation: float = LIMITS["gate_degradation"],
    kl_floor: float = 1e-10,
) -> Row:
    """The verdict with every row behind it; both sections are those of `gauge.conclude`."""
    refuse_limits(worse_than, max_degradation)
    _refuse_noise(baseline, candidate)
    pairs = pairs_of(baseline["samples"], candidate["samples"])
    asked = _common(baseline, candidate)
    divergence = [
        _divergence(baseline, candidate, of, pairs, looks=len(asked), worse_than=worse_than, floor=kl_floor)
        for of in asked
    ]
    limits = _limits(candidate, max_degradation)
    scores = [name for name in candidate["accuracy"] if name in baseline["accuracy"]]
    finite, kept = _finite(baseline, candidate), _clean_score(baseline, candidate, pairs, max_degradation)
    losses = [row["degradation"]["value"] for row in limits if row["degradation"]["value"] is not None]
    return {
        "verdict": _overall(divergence, [*divergence, *limits, finite, kept]),
        "worse_than": worse_than,
        "max_degradation_allowed": max_degradation,
        "max_degradation": max(losses, default=None),
        "worst": max(divergence, key=lambda row: (row["verdict"] != UNDECIDED, row["ratio"]["value"] or 0.0)),
        "paired": pairs is not None,
        "n": samples_of(baseline["samples"], candidate["samples"]),
        "divergence": divergence,
        "limits": limits,
        "finite": finite,
        "clean_score": kept,
        "accuracy": [_accuracy(baseline, candidate, name, pairs) for name in scores],
    }


def checks(result: Row) -> list[Row]:
    """All that was decided, each with its name, verdict and message; of a whole gate its conditions first."""
    said = [result["conditions"]] if "conditions" in result else []
    return [*said, *result["divergence"], *result["limits"], result["finite"], result["clean_score"]]


def _overall(divergence: list[Row], decided: list[Row]) -> str:
    if any(row["verdict"] == FAIL for row in decided):
        return FAIL
    return UNDECIDED if all(row["verdict"] == UNDECIDED for row in divergence) else PASS


def _common(baseline: Section, candidate: Section) -> list[tuple[str, str]]:
    """(measure, operator) that both sides have."""
    return [(measure, name) for measure in MEASURES for name in baseline[measure] if name in candidate[measure]]


def refuse_limits(worse_than: float, max_degradation: float) -> None:
    """What can't be meant."""
    if not worse_than > 1:
        raise InvalidInput(
            f"a model fails above a multiple of its baseline, such as 1.2 (--max-worse 0.2); got {worse_than:g}"
        )
    if not 0 < max_degradation < 1:
        raise InvalidInput(
            f"what noise may cost (--max-degradation) is a share between 0 and 1, such as 0.15; got {max_degradation:g}"
        )


def _refuse_noise(baseline: Section, candidate: Section) -> None:
    if baseline["noise"] != candidate["noise"] or not _common(baseline, candidate):
        before, now = (
            f"{side['noise']} in {', '.join({**side['predicted_kl'], **side['kl']}) or 'nothing'}"
            for side in (baseline, candidate)
        )
        raise InvalidInput(
            f"the baseline was measured under {before}, this model under {now}: there is nothing to compare. Make a "
            "new baseline with noisescope diagnose"
        )


def _values(section: Section, measure: str, name: str) -> Array:
    return np.array(section[measure][name], dtype=np.float64)  # None becomes NaN


def _divergence(
    baseline: Section,
    candidate: Section,
    of: tuple[str, str],
    pairs: Pairs,
    *,
    looks: int,
    worse_than: float,
    floor: float,
) -> Row:
    """One operator on both sides; samples without a finite KL are left out."""
    measure, operator = of
    x, y = (_values(section, measure, operator) for section in (baseline, candidate))
    if pairs is not None:
        x, y = x[pairs[0]], y[pairs[1]]
    known = np.isfinite(x), np.isfinite(y)
    if pairs is not None:
        known = (known[0] & known[1],) * 2
    u, v = (np.log(np.maximum(side[kept], floor)) for side, kept in zip((x, y), known, strict=True))
    row: Row = {"name": f"{MEASURES[measure]}: {operator}", "measure": measure, "operator": operator}
    row["left_out"] = int((~known[0]).sum() + (~known[1]).sum())
    if not len(u) or not len(v):
        nothing = stats.Estimate(None, None, None, 0, note=stats.NOT_MEASURABLE).to_dict()
        told = "no sample has a finite divergence"
        return {**row, "ratio": nothing, "smallest_detectable": None, "verdict": UNDECIDED, "message": told}
    level = stats.simultaneous_level(looks)
    shift = stats.trimmed_shift(u, v, paired=pairs is not None)
    change = shift.estimate(level).to_dict()
    row["baseline"], row["candidate"] = float(np.exp(np.median(u))), float(np.exp(np.median(v)))
    row["ratio"] = {**change, **{end: _exp(change[end]) for end in ("value", "low", "high")}}
    row["smallest_detectable"] = _caught(shift, level, worse_than)
    row["verdict"] = _verdict(row["ratio"], row["smallest_detectable"], worse_than)
    row["message"] = _told(row, worse_than)
    return row


def _caught(shift: stats.Shift, level: float, worse_than: float) -> float | None:
    """The ratio found with POWER: its interval must leave 1 out, and it must pass the limit. None: hardly any."""
    smallest = shift.smallest_detectable(level, POWER)
    if smallest is None or smallest > _HOPELESS:
        return None
    return max(math.exp(smallest), worse_than * math.exp(shift.excess(POWER)))


def _verdict(ratio: Row, caught: float | None, worse_than: float) -> str:
    if ratio["low"] is not None and ratio["low"] > 1 and ratio["value"] > worse_than:
        return FAIL
    harmless = ratio["high"] is not None and ratio["high"] <= worse_than
    return PASS if harmless or (caught is not None and caught <= 2 * worse_than - 1) else UNDECIDED


def _limits(candidate: Section, limit: float) -> list[Row]:
    """What noise costs, operator by operator, against the most it may cost."""
    names = [name for name in candidate["accuracy"] if name != CLEAN]
    clean = _values(candidate, "accuracy", CLEAN)
    rows = []
    for name in names:
        loss = stats.degradation(
            clean,
            _values(candidate, "accuracy", name),
            chance=candidate["chance"],
            level=stats.simultaneous_level(len(names)),
        ).to_dict()
        over = loss["low"] is not None and loss["low"] > limit
        under = loss["high"] is not None and loss["high"] <= limit
        row: Row = {"name": f"accuracy under noise: {name}", "operator": name, "degradation": loss, "limit": limit}
        row["verdict"] = FAIL if over else PASS if under else UNDECIDED
        rows.append({**row, "message": _limit_told(row)})
    return rows


def _clean_score(baseline: Section, candidate: Section, pairs: Pairs, limit: float) -> Row:
    """Without noise: a model that surely lost more than the limit of what its baseline scored fails, robust or not.

    The divergence of a model that answers nothing right may be small. Short of that, the score does not decide.
    """
    found = _accuracy(baseline, candidate, CLEAN, pairs)
    before, change = found["baseline"]["value"], found["difference"]
    row: Row = {"name": "score without noise", "limit": limit}
    if not before or change["high"] is None:
        return {**row, "verdict": UNDECIDED, "message": f"the change of the score is {stats.NOT_MEASURABLE}"}
    row["verdict"] = FAIL if change["high"] < -limit * before else PASS
    told = f"{percent(before)} before, {percent(found['candidate']['value'])} now"
    return {**row, "message": f"{told}; fails where surely more than {100 * limit:g} % of it is lost"}


def _accuracy(baseline: Section, candidate: Section, name: str, pairs: Pairs) -> Row:
    """The metric on both sides, with the smallest drop it could have shown."""
    x, y = (_values(section, "accuracy", name) for section in (baseline, candidate))
    if pairs is None:
        change = unpaired(x, y).to_dict()
        smallest = smallest_unpaired(change, 1, power=POWER)
    else:
        x, y = x[pairs[0]], y[pairs[1]]
        change = stats.difference(y, x).to_dict()
        smallest = stats.smallest_detectable(x, y, power=POWER)
    sides = {"baseline": stats.mean(x).to_dict(), "candidate": stats.mean(y).to_dict()}
    return {"under_noise_in": name, **sides, "difference": change, "smallest_detectable": smallest}


# -- words


def _told(row: Row, worse_than: float) -> str:
    ratio, caught = row["ratio"], row["smallest_detectable"]
    words = f"x {ratio['value']:.2f} {span(ratio, '.2f')} of the baseline's, limit x {worse_than:g}, n = {ratio['n']}"
    if row["verdict"] == FAIL:
        return words
    if caught is None:
        return f"{words}; nothing could have been caught"
    return f"{words}; {'could only' if row['verdict'] == UNDECIDED else 'would'} have caught x {caught:.2f}"


def _limit_told(row: Row) -> str:
    loss = row["degradation"]
    if loss["value"] is None:
        return f"what noise costs is {stats.NOT_MEASURABLE}: the clean score does not stand clear of chance"
    sure = {PASS: "surely under", FAIL: "surely over", UNDECIDED: "not sure, raise --samples"}[row["verdict"]]
    return f"costs {percent(loss['value'])} {span(loss, '.1f', 100)} of it, limit {100 * row['limit']:g} %: {sure}"


def _finite(baseline: Section, candidate: Section) -> Row:
    count = candidate["nonfinite"]
    bad = count > 0 and not baseline["nonfinite"]
    told = f"{counted(count, 'token')} not finite" + (", the baseline's all were" if bad else "")
    return {"name": "finite outputs", "verdict": FAIL if bad else PASS, "message": told}


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)
