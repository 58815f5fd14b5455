"""Which layers to validate first on new hardware, in which precision, and how: from the evidence of a report.

    priority 1   layers that surely lose a tenth of the accuracy or more under noise, that all windows of an avalanche
                 point share, whose noise moves the output three times as far as the median layer's, or that have
                 channels 50 times the median, or not finite: compared in full, MAPE below 5 %
    priority 2   the other layers of an avalanche point, a sure loss of a twentieth, one and a half times the median
                 layer's nats, or channels 20 times the median: spot-checked, MAPE below 10 %
    priority 3   all others: standard formats, nothing special

Outliers are those of linears: a massive channel of the residual stream stays in it to the end, so it tells no layer
from another. Within a priority the dearest comes first. Places outside the blocks (embed, lm_head) are ranked, too.
Records keep whole tensors of blocks alone, or of everything, so these places are compared by their sketches: by their
relative L2, and whether they part, in the comparison of everything.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from noisescope.errors import InvalidInput
from noisescope.findings import ADVICE, BANDS, LIMITS, percent
from noisescope.plans.evidence import cost, sure_loss

Row = dict[str, Any]
Report = Mapping[str, Any]
COSTLY = (3.0, 1.5)  # times the median layer's nats: priorities 1 and 2
HEADROOM = 0.5  # of FP16's range may be used by what was captured: other inputs go further
REFERENCE, TARGET, COMPARISON = "reference.record", "target.record", "comparison.json"


def plan_migration(report: Report, *, path: str = "report.json", device: str = "cuda") -> Row:
    """Priorities with their evidence, precision and validation, and the commands to run next.

    `path` is where the report lies and `device` what the new machine calls its accelerator: both go into the commands.
    """
    if not (report.get("layer_analysis") or {}).get("layers"):
        raise InvalidInput(
            "a migration plan needs the layer level: noisescope diagnose MODEL --level operator,layer,channel"
        )
    ranked = rank_places(report)
    return {**ranked, "commands": list(_commands(report, ranked["priorities"], path, device))}


def rank_places(report: Report) -> Row:
    """Priorities with their evidence, precision and validation: what a report of layers says by itself."""
    section = report["layer_analysis"]
    rows = {row["layer"]: row for row in section["layers"]} | section["places"]
    median = statistics.median(cost(row) for row in section["layers"])
    ranked = [_judged(report, place, row, median) for place, row in rows.items()]
    ranked.sort(key=lambda entry: (entry["priority"], -(entry["loss"] or 0.0), -entry["nats"]))
    priorities = [_priority(number, [e for e in ranked if e["priority"] == number]) for number in (1, 2, 3)]
    predicted = not any(row.get("evidence") == "injected" for row in rows.values())
    return {
        "priorities": priorities,
        "fallback": ADVICE["divergence"],
        "notes": ["ranked by predictions alone: diagnose with --effort standard to confirm them"] if predicted else [],
    }


def _judged(report: Report, place: Any, row: Mapping[str, Any], median: float) -> Row:
    """A layer's priority and every reason for it, the gravest first."""
    found = sorted(_reasons(report, place, row, median))
    nats, loss = cost(row), sure_loss(row)
    largest = max((info["global_max"] for _, info in _captured(report, place)), default=None)
    return {
        "place": place,
        "priority": min((priority for priority, _ in found), default=3),
        "reasons": [reason for _, reason in found],
        "nats": nats,
        "loss": loss,
        "largest_activation": largest,
    }


def _reasons(report: Report, place: Any, row: Mapping[str, Any], median: float) -> Iterable[tuple[int, str]]:
    """(priority, reason) of everything that speaks for looking at a layer."""
    for point in report["executive_summary"]["avalanche_points"]:
        first, last = point["start"], point["end"]
        common = point.get("common") or (first, last)
        if isinstance(place, int) and first <= place <= last:
            inner = common[0] <= place <= common[1]
            lost = f"avalanche point L{first}-{last}: {percent(point['degradation'])} of the accuracy lost"
            yield (1, lost) if inner else (2, f"beside the core of {lost}")
    loss, (moderate, high, _) = sure_loss(row), BANDS["degradation"].limits
    if loss is not None and loss >= moderate:
        yield 1 if loss >= high else 2, f"noise in it alone costs {percent(loss)} of the accuracy"
    nats = cost(row)
    if median and nats >= COSTLY[1] * median:
        words = f"noise in it moves the output by {nats:.3g} nats, {nats / median:.1f} x the median layer"
        yield 1 if nats >= COSTLY[0] * median else 2, words
    for name, info in _captured(report, place):
        if info["nonfinite_channels"]:
            yield 1, f"{name}: {info['nonfinite_channels']} channels are not finite"
        if info["operator"] == "linear" and info["band"] in ("HIGH", "CRITICAL"):
            channels = (
                f"{name}: {info['num_outliers']} outlier channels, the largest {info['max_ratio']:.0f} x the median"
            )
            yield 1 if info["band"] == "CRITICAL" else 2, channels


def _captured(report: Report, place: Any) -> list[tuple[str, Any]]:
    """(name, row) of each module of a layer whose channels were captured."""
    rows = (report.get("channel_analysis") or {}).get("per_layer", {})
    return [(name, info) for name, info in rows.items() if info["layer"] == place]


def _priority(number: int, entries: Sequence[Row]) -> Row:
    first, second = LIMITS["migration_mape"], LIMITS["migration_mape_second"]
    layers = [entry["place"] for entry in entries if isinstance(entry["place"], int)]
    places = [entry["place"] for entry in entries if not isinstance(entry["place"], int)]
    validation = {
        1: f"compare every operator of these layers between both machines: MAPE below {100 * first:g} %",
        2: f"compare the outputs of these layers: MAPE below {100 * second:g} %",
        3: "nothing special: the end-to-end score will do",
    }[number]
    if places and number < 3:
        validation += f"; {' and '.join(places)}, outside the layers: by sketch, no site may part"
    return {
        "priority": number,
        "layers": layers,
        "places": places,
        "precision": {str(entry["place"]): _precision(number, entry["largest_activation"]) for entry in entries},
        "validation": validation,
        "max_mape": {1: first, 2: second, 3: None}[number],
        "evidence": [{name: value for name, value in entry.items() if name != "priority"} for entry in entries],
    }


def _precision(priority: int, largest: float | None) -> str:
    """FP16 has the finer steps, and only where what was captured stays far below 65504."""
    if priority == 3:
        return "INT8 or BF16"
    fits = largest is not None and largest < HEADROOM * LIMITS["fp16_maximum"]
    return "FP16" if priority == 1 and fits else "BF16"


def _commands(report: Report, priorities: Sequence[Row], path: str, device: str) -> Iterable[Row]:
    run = report["run"]
    model, source = shlex.quote(run["model"]["source"]), run["data"]["source"]
    data = "" if source in ("demo", "built-in text", "tokenised batches") else f" --data {shlex.quote(source)}"
    first, second = (sorted(entry["layers"]) for entry in priorities[:2])
    whole = f" --full-layers {_listed(sorted(first + second))}" if first or second else ""
    dtype = f"--dtype {run['conditions']['dtype']}"  # the same on both machines, whatever each would choose
    here, there, both = "the machine that is right", "the new machine", "either machine, with both records"
    record = f"noisescope record {model}{data} {dtype}{whole}"
    yield {"where": here, "command": f"{record} -o {REFERENCE}"}
    yield {"where": there, "command": f"{record} --device {device} -o {TARGET}"}
    report_path = shlex.quote(path)
    compare = f"noisescope compare {REFERENCE} {TARGET}"
    outside = [place for entry in priorities[:2] for place in entry["places"]]
    rows = f"; for {' and '.join(outside)} see the rows of that place in {COMPARISON}: relative_l2, parts"
    everything = f"{compare} --sensitivity {report_path} -o {COMPARISON}"
    yield {"where": f"{both}: everything{rows if outside else ''}", "command": everything}
    for layers, limit in ((first, "migration_mape"), (second, "migration_mape_second")):
        if layers:
            asked = f"--layers {_listed(layers)} --max-mape {LIMITS[limit]:g}"
            yield {"where": both, "command": f"{compare} {asked}"}
    locate = f"noisescope locate {model} {dtype} --device {device}"
    yield {"where": f"{there}, where a comparison fails", "command": locate}
    tests = f"noisescope plan fault-tests {report_path} --run"
    yield {"where": "either machine: what the weakest places stand", "command": tests}


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
