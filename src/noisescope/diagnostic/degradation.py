"""A checkpoint against degradations alone, which is all that a baseline in the original method notes' shape holds.

An operator fails where noise in it costs more than 1.2 times the baseline's degradation and the interval lies above the
baseline's: near a baseline of 0 every number is 1.2 times as large, so there the interval decides. The largest cost
fails where its interval lies above the limit. What the interval leaves open is undecided. The baseline's own
uncertainty is not known, so these intervals count the checkpoint's alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from torch import nn

from noisescope.diagnostic.asking import Row
from noisescope.diagnostic.levels import loss_of, operator_level_diagnosis
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS, percent
from noisescope.findings.verdicts import FAIL, PASS, UNDECIDED, Verdict, overall
from noisescope.model import Subject


def baseline_degradations(report: Mapping[str, Any]) -> dict[str, float | None]:
    """{operator: degradation} of a report in the notes' shape."""
    rows = report.get("operator_analysis")
    if not isinstance(rows, Mapping) or not rows:
        came = ", ".join(map(str, report)) or "nothing"
        raise InvalidInput(
            "a baseline is the report of IntegratedDiagnostic, noisescope's own, or a dictionary with "
            f"operator_analysis ({{operator: {{'degradation': 0.08}}}}); this one has {came}"
        )
    without = [str(name) for name, row in rows.items() if not isinstance(row, Mapping) or "degradation" not in row]
    if without:
        raise InvalidInput(f"operator_analysis of the baseline has no degradation for {', '.join(without)}")
    return {str(name): loss_of(row) for name, row in rows.items()}


def compared(
    model: Subject | nn.Module,
    test_data: Any,
    baseline: Mapping[str, float | None],
    *,
    limit: float,
    worse_than: float = LIMITS["gate_worse_than_baseline"],
    **more: Any,
) -> Row:
    """The verdict on a model: operators of the baseline measured again, each compared, and the largest cost."""
    rows = operator_level_diagnosis(model, test_data, operators=baseline, **more)
    limits = [
        {"operator": name, "degradation": row["degradation_interval"], "verdict": _within(row, limit)}
        for name, row in rows.items()
        if row["degradation_interval"] is not None
    ]
    verdicts = {name: _against(rows[name], baseline[name], worse_than) for name in baseline if name in rows}
    costs = [row["degradation"] for row in rows.values() if row["degradation"] is not None]
    over = [row["operator"] for row in limits if row["verdict"] == FAIL]
    warnings = [
        _warning(name, rows[name], baseline[name], f"more than {worse_than:g} times the baseline's")
        for name, verdict in verdicts.items()
        if verdict == FAIL
    ]
    warnings += [_warning(name, rows[name], baseline[name], f"above the limit of {percent(limit)}") for name in over]
    return {
        "verdict": overall([*verdicts.values(), *(row["verdict"] for row in limits)]),
        "max_degradation": max(costs, default=None),
        "warnings": warnings,
        "limits": limits,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _against(row: Row, baseline: float | None, worse_than: float) -> Verdict:
    cost, interval = row["degradation"], row["degradation_interval"]
    if cost is None or baseline is None:
        return UNDECIDED
    if cost > worse_than * baseline and interval["low"] > baseline:
        return FAIL
    return PASS if interval["high"] <= max(worse_than * baseline, 0.0) else UNDECIDED


def _within(row: Row, limit: float) -> Verdict:
    interval = row["degradation_interval"]
    if interval["value"] is None:
        return UNDECIDED
    return FAIL if interval["low"] > limit else PASS if interval["high"] <= limit else UNDECIDED


def _warning(name: str, row: Row, baseline: float | None, why: str) -> Row:
    message = f"noise in {name} costs {percent(row['degradation'])} of the accuracy, {why}"
    return {
        "operator": name,
        "baseline": baseline,
        "current": row["degradation"],
        "severity": "WARNING",
        "message": message,
    }
