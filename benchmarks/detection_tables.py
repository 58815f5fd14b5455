"""Tallies of the fault-finding benchmark: hits, false alarms with their bound, limits, confusion, each with its n."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from detection_grid import NOTES, TENTH
from scipy.stats import beta

Row = dict[str, Any]
ROUND_OFF = 0.43  # rms of one correct rounding in ulps of the result, as measured on healthy operators
SIGMAS = 6.0
TARGET = 0.99
GROUPS = ("family", "operator", "density", "dtype", "model", "part", "place")

# What the notes' own trials found at a block's output: one run a size, at one or three layers of one model.
NOTES_DENSE = {
    "dead_zone": ("exact", "exact", "exact", "exact"),
    "saturation": ("rank 4", "rank 3", "rank 3", "rank 2"),
    "spike": ("exact", "exact", "exact", "exact"),
    "noise": ("top 5", "exact", "exact", "exact"),
    "bias": ("missed", "missed", "missed", "missed"),
    "non_determinism": ("exact", "exact", "-", "-", "exact", "-"),
}
NOTES_TENTH = {"dead_zone": "exact", "saturation": "missed", "spike": "exact", "noise": "exact", "bias": "missed"}


def counts(row: Row) -> bool:
    """Whether a fault is large enough to have to be found: over 4 ulp anywhere, or its rms or signed mean significant.

    Significant is beyond six sigmas of what correct rounding does to as many elements: its mean has sd 0.43 / sqrt(n)
    ulp, its mean square (relative to 0.43^2) sd sqrt(2 / n).
    """
    effect = row["effect"]
    if not row["changed"] or not effect["elements"]:
        return False
    n = effect["elements"]
    return bool(
        effect["max_ulp"] > 4
        or abs(effect["mean_ulp"]) > SIGMAS * ROUND_OFF / math.sqrt(n)
        or effect["rms_ulp"] ** 2 > SIGMAS * math.sqrt(2 / n) * ROUND_OFF**2
    )


def upper_bound(hits: int, n: int, level: float = 0.95) -> float:
    """Clopper and Pearson's one-sided upper limit of a proportion: 0 of 200 is at most 1.5 %."""
    return 1.0 if n == 0 or hits >= n else float(beta.ppf(level, hits + 1, n - hits))


def split(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Controls, no-ops, faults that have to be found, and faults too small for that."""
    found: dict[str, list[Row]] = {"control": [], "no-op": [], "fault": [], "small": [], "refused": []}
    for row in rows:
        if row.get("refused"):
            kind = "refused"
        elif row["part"] == "control":
            kind = "control"
        else:
            kind = "no-op" if not row["changed"] else "fault" if counts(row) else "small"
        found[kind].append(row)
    return found


def hits(rows: list[Row]) -> Row:
    """Shares of faults found, with their n; the class among those whose place was named first."""
    placed = [row for row in rows if row["top1_place"]]

    def share(name: str, among: list[Row]) -> float | None:
        return sum(bool(row[name]) for row in among) / len(among) if among else None

    return {
        "n": len(rows),
        "alarm": share("alarm", rows),
        "top1_place": share("top1_place", rows),
        "top1_operator": share("top1_operator", rows),
        "top1_module": share("top1_module", rows),
        "top3_place": share("top3_place", rows),
        "class_right": share("class_right", rows),
        "class_exact": share("class_exact", rows),
        "n_placed": len(placed),
        "class_right_placed": share("class_right", placed),
        "class_named_placed": share("class_named", placed),
    }


def summary(rows: list[Row], method: str) -> Row:
    """Everything about one method."""
    mine = [row for row in rows if row["method"] == method]
    parts = split(mine)
    faults, controls = parts["fault"], [row for row in parts["control"] if not row["error"]]
    alarms = sum(row["alarm"] for row in controls)
    undecided = sum(row["verdict"] == "undecided" for row in controls)
    acting = faults + parts["small"]
    run = [row for row in mine if not row.get("refused")]
    notes = [row for row in acting if row["part"] == "notes"]
    return {
        "method": method,
        "n": len(mine),
        "refused": len(parts["refused"]),
        "crashed": sum(bool(row["error"]) for row in run),
        "faults": hits(faults),
        "too_small": hits(parts["small"]),
        "notes_families": hits(notes),
        "controls": {
            "n": len(controls),
            "false_alarms": alarms,
            "bound_95": upper_bound(alarms, len(controls)),
            "undecided": undecided,
            "by_model": _counted((row["model"], row["alarm"]) for row in controls),
            "by_dtype": _counted((row["dtype"], row["alarm"]) for row in controls),
        },
        "no_ops": _no_ops(parts["no-op"]),
        "cost": {
            "forwards_healthy": _mean(row["forwards"] for row in controls),
            "forwards_faulty": _mean(row["forwards"] for row in acting),
            "seconds_healthy": _mean(row["seconds"] for row in controls),
            "seconds_faulty": _mean(row["seconds"] for row in acting),
        },
        **{f"by_{name}": _grouped(faults, name) for name in GROUPS},
        "by_size": sizes(acting),
        "limits": limits(acting),
        "confusion": confusion(faults),
        "notes": against_notes(notes, parts["no-op"]),
    }


def sizes(rows: list[Row]) -> list[Row]:
    """Each family at each size and dtype, from mild to severe, of whatever effect."""
    return [
        {"family": family, "severity": severity, "size": size, "dtype": dtype, **hits(group)}
        for (family, severity, size, dtype), group in _by(rows, "family", "severity", "size", "dtype")
    ]


def limits(rows: list[Row]) -> list[Row]:
    """The mildest size of each family from which on 99 % are found, place and operator; None: not even the worst."""
    found = []
    for (family, dtype), group in _by(rows, "family", "dtype"):
        limit: str | None = None
        n = 0
        for (_, size), same in reversed(_by(group, "severity", "size")):
            if sum(row["top1_operator"] for row in same) < TARGET * len(same):
                break
            limit, n = size, n + len(same)
        found.append({"family": family, "dtype": dtype, "limit": limit, "n": n})
    return found


def confusion(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Class of the fault -> class of the first suspect, where that is at the right place -> how often."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row["top1_place"]:
            table[row["wanted_class"]][row["suspects"][0]["class"]] += 1
    return {wanted: dict(said.most_common()) for wanted, said in sorted(table.items())}


def against_notes(rows: list[Row], no_ops: list[Row]) -> list[Row]:
    """The notes' six families at a block's output, beside the notes' own figures."""
    idle = Counter((row["family"], row["severity"], row["density"]) for row in no_ops if row["part"] == "notes")
    found = []
    for (family, severity, density, size), group in _by(rows, "family", "severity", "density", "size"):
        worst = severity == len(NOTES_DENSE[family]) - 1
        theirs = NOTES_TENTH.get(family, "-") if worst else "-"
        if density != TENTH:
            theirs = NOTES_DENSE[family][severity]
        found.append({"family": family, "size": size, "density": density, "theirs": theirs,
                      "no_ops": idle[family, severity, density], **hits(group)})  # fmt: skip
    return sorted(found, key=lambda row: (row["density"] == TENTH, NOTES.index(row["family"])))


def failures(rows: list[Row]) -> list[Row]:
    """What went wrong: false alarms, alarms on no-ops, faults not found or misplaced, and classes misnamed."""
    parts = split(rows)
    bad = [row for row in parts["control"] + parts["no-op"] if row["alarm"] or row["error"]]
    return bad + [row for row in parts["fault"] if not (row["top1_module"] and row["class_right"])]


def _no_ops(rows: list[Row]) -> Row:
    return {"n": len(rows), "healthy": sum(row["verdict"] == "healthy" for row in rows)}


def _counted(pairs: Iterable[tuple[str, bool]]) -> dict[str, str]:
    total: dict[str, list[bool]] = defaultdict(list)
    for name, alarm in pairs:
        total[name].append(alarm)
    return {name: f"{sum(alarms)} of {len(alarms)}" for name, alarms in sorted(total.items())}


def _grouped(rows: list[Row], name: str) -> dict[str, Row]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        value = row[name]
        groups[f"{value:02}" if isinstance(value, int) else str(value)].append(row)
    return {value: hits(group) for value, group in sorted(groups.items())}


def _by(rows: list[Row], *names: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return sorted(groups.items())


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


# -- print


def show(found: Row) -> None:
    """One method's tables."""
    controls, idle, cost = found["controls"], found["no_ops"], found["cost"]
    print(f"\n== {found['method']}: {found['n']} cells ({found['refused']} refused, {found['crashed']} crashed)")
    _head("")
    _line("faults that count", found["faults"])
    _line("smaller ones", found["too_small"])
    _line("the notes' six families", found["notes_families"])
    print(
        f"controls: {controls['false_alarms']} false alarms of {controls['n']} (95 %: at most "
        f"{controls['bound_95']:.1%}), {controls['undecided']} undecided; by dtype {controls['by_dtype']}, by model "
        f"{controls['by_model']}\nno-ops: {idle['healthy']} of {idle['n']} called healthy"
    )
    for what in ("forwards", "seconds"):
        print(f"{what}: {_number(cost[f'{what}_healthy'])} healthy, {_number(cost[f'{what}_faulty'])} faulty")
    for name in GROUPS:
        _head(name)
        for label, row in found[f"by_{name}"].items():
            _line(label, row)
    _head("family: size (all that change anything)")
    for row in found["by_size"]:
        _line(f"{row['family']}: {row['size']} {row['dtype']}", row)
    print("\nmildest size from which on 99 % are found (place and operator):")
    for row in found["limits"]:
        print(f"  {row['family']:<20}{row['dtype']:<10}{row['limit'] or 'none'} (n = {row['n']})")
    print("\nclass of the fault -> class named, where the place is right:")
    for wanted, said in found["confusion"].items():
        print(f"  {wanted:<18}{', '.join(f'{name} {count}' for name, count in said.items())}")
    print("\nat a block's output: family, size, density | the notes' trials | top-1 place here | n | no-ops")
    for row in found["notes"]:
        label = f"{row['family']} {row['size']}, {row['density']}"
        print(f"  {label:<46}{row['theirs']:<9}{_percent(row['top1_place'])} {row['n']:>5} {row['no_ops']:>5}")


def show_failures(rows: list[Row], most: int) -> None:
    for row in rows[:most]:
        said = ", ".join(f"{s['operator']}@{s['place']} {s['class']} ({s['module']})" for s in row["suspects"][:2])
        evidence = row["suspects"][0]["evidence"] if row["suspects"] else ""
        if row["part"] == "control":
            print(
                f"\nCONTROL {row['model']} {row['dtype']} prompt {row['prompt']}: {row['verdict']}: {said}: {evidence}"
            )
            continue
        effect = row["effect"]
        print(
            f"\n{row['family']} {row['size']} {row['density']} {row['dtype']} {row['model']} at {row['place']}/"
            f"{row['operator']}#{row['occurrence']} {row['module']} [cell {row['cell']}, seed {row['seed']}, prompt "
            f"{row['prompt']}]\n  changed {row['changed']}, max {effect['max_ulp']:.4g} ulp, mean "
            f"{effect['mean_ulp']:+.3f} ulp, rms {effect['rms_ulp']:.3f} ulp, relative rms {effect['rms']:.3g}, "
            f"n {effect['elements']}\n"
            f"  {row['verdict']}: {said} {row['error']}\n  {evidence}"
        )


def _head(name: str) -> None:
    print(f"\n{name:<44}{'n':>5}{'alarm':>8}{'layer':>8}{'+op':>8}{'+module':>8}{'top 3':>8}{'class':>8}{'of n':>6}")


def _line(label: str, row: Row) -> None:
    columns = ("alarm", "top1_place", "top1_operator", "top1_module", "top3_place", "class_right_placed")
    cells = "".join(f"{_percent(row[name]):>8}" for name in columns)
    print(f"{label:<44}{row['n']:>5}{cells}{row['n_placed']:>6}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
