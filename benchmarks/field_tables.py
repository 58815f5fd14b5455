"""Tables of the field benchmark: outcomes with their numbers, and every miss in one line."""

from __future__ import annotations

from collections import Counter
from typing import Any

from field_judge import (
    CRASH,
    EXCLUDED,
    FAULT_OUTCOMES,
    HEALTHY,
    HEALTHY_OUTCOMES,
    NAMED,
    WRONG_CLASS,
)

Row = dict[str, Any]


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts of outcomes. Shares are of the faults that change something, or of the models that could be built."""
    faults = [row for row in rows if row["part"] == "faults" and row["outcome"] != EXCLUDED]
    named = [row for row in faults if row["outcome"] in (NAMED, WRONG_CLASS)]
    healthy = [row for row in rows if row["part"] == "healthy" and row["outcome"]]
    seconds = sorted(row["seconds"] for row in (*faults, *healthy))
    return {
        "faults": len(faults),
        "excluded": sum(row["outcome"] == EXCLUDED for row in rows),
        "fault_outcomes": {name: sum(row["outcome"] == name for row in faults) for name in FAULT_OUTCOMES},
        "named_share": len(named) / len(faults) if faults else None,
        "class_right_share": sum(row["class_right"] for row in named) / len(named) if named else None,
        "module_right_share": sum(row["module_right"] for row in named) / len(named) if named else None,
        "by_kind": {kind: _shares(faults, "kind", kind) for kind in sorted({row["kind"] for row in faults})},
        "by_phase": {phase: _shares(faults, "phase", phase) for phase in sorted({row["phase"] for row in faults})},
        "healthy": len(healthy),
        "skipped": sum("skipped" in row for row in rows),
        "healthy_outcomes": {name: sum(row["outcome"] == name for row in healthy) for name in HEALTHY_OUTCOMES},
        "median_seconds": seconds[len(seconds) // 2] if seconds else None,
    }


def _shares(rows: list[Row], key: str, value: str) -> dict[str, int]:
    return dict(Counter(row["outcome"] for row in rows if row[key] == value))


def show(rows: list[Row], method: str) -> None:
    found = summary(rows)
    print(f"\n{method}: {found['faults']} faults, {found['excluded']} more change nothing")
    width = max(map(len, FAULT_OUTCOMES))
    columns = {"all": found["fault_outcomes"], **found["by_phase"], **found["by_kind"]}
    print(" " * width, *(f"{name:>9}" for name in columns))
    for outcome in FAULT_OUTCOMES:
        print(f"{outcome:{width}}", *(f"{counts.get(outcome, 0):9}" for counts in columns.values()))
    print(f"{'n':{width}}", *(f"{sum(counts.values()):9}" for counts in columns.values()))
    for name in ("named_share", "class_right_share", "module_right_share"):
        if found[name] is not None:
            print(f"{name.replace('_', ' ')}: {found[name]:.1%}")
    print(f"\n{method}: {found['healthy']} healthy models, {found['skipped']} more could not be built")
    for outcome, count in found["healthy_outcomes"].items():
        print(f"{outcome:{width}} {count:9}")
    if found["median_seconds"] is not None:
        print(f"median processor time {found['median_seconds']:.2f} s per run")
    misses = [row for row in rows if _missed(row)]
    print(f"\n{len(misses)} misses")
    for row in sorted(misses, key=lambda row: (row["part"], row["outcome"], row["cell"])):
        print(f"  {row['outcome']}: {row['cell']}; {_said(row)}")


def _missed(row: Row) -> bool:
    if row["part"] == "healthy":
        return row["outcome"] not in ("", HEALTHY)
    return row["outcome"] not in (NAMED, EXCLUDED)


def _said(row: Row) -> str:
    if row["outcome"] == CRASH:
        return str(row["error"])
    said = row["said"]
    words = []
    if said["suspects"]:
        first = said["suspects"][0]
        side = f"{first['tensor']} of " if first["tensor"] != "output" else ""
        words.append(f"says {side}{first['operator']} at {first['place']} ({first['module']}), {first['fault_class']}")
        words.append(f"{said['count']} suspects")
    elif said["unseen"]:
        words.append(f"{len(said['unseen'])} not judged, first {said['unseen'][0]}")
    if row["part"] == "faults":
        change = row["change"]
        words.append(
            f"changes {change['relative']:.2g} of {change['module'] or 'logits'}, logits {change['logits']:.2g}"
        )
        words.append(f"right is {row['expected']}")
    return "; ".join(words)
