"""The JSON Schema of a report (draft 2020-12), built here so that its parts are named once. Published in docs/.

Strict where readers rely on it (names, types, an n and an interval with every estimate), open where later parts add
sections of their own.
"""

from __future__ import annotations

from noisescope.reports.schema.actions import CHECK, LOCATE, MIGRATION, PRECISION_PLAN
from noisescope.reports.schema.levels import (
    CHANNELS,
    CORRELATION,
    FORMAT_SCORES,
    GATE,
    LAYERS,
    LEVEL,
    METRICS,
    MODULE,
    POINT,
    THRESHOLD,
)
from noisescope.reports.schema.parts import (
    COUNT,
    EFFECT,
    ESTIMATE,
    EVIDENCE,
    FINDING,
    NUMBER,
    RISK,
    TEXT,
    Schema,
    listed,
    maybe,
    named,
    record,
    ref,
)

RUN = record(
    {
        "model": record({"source": TEXT, "architecture": TEXT, "fingerprint": TEXT, "blocks": COUNT}, closed=False),
        "data": record({"source": TEXT, "samples": COUNT, "fingerprint": TEXT}, closed=False),
        "settings": {"type": "object"},
        "metric": TEXT,
        "conditions": {"type": "object"},
        "device": TEXT,
        "cost": record({"seconds": NUMBER, "trials": COUNT, "trials_run_now": COUNT, "forwards": NUMBER}),
        "finished": TEXT,
        "versions": named(TEXT),
    },
    closed=False,
)

SUMMARY = record(
    {
        "critical_operators": listed(TEXT),
        "num_critical_operators": COUNT,
        "avalanche_points": listed(ref("point")),
        "num_avalanche_points": COUNT,
        "total_outlier_channels": maybe(COUNT),
        "overall_risk_level": TEXT,
        "report_risk": ref("risk"),
        "dashboard_risk": ref("risk"),
        "top_findings": {"type": "array", "items": ref("finding"), "maxItems": 3},
        "next_step": TEXT,
        "in_plain_words": record({"risk": TEXT, "work": TEXT}, {"success": TEXT}),
    }
)


def schema() -> Schema:
    """The schema of report.json, version 1: a diagnosis, or accuracy at noise levels."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "noisescope report",
        "type": "object",
        "properties": {
            "schema_version": {"const": 1},
            "run": RUN,
            "executive_summary": SUMMARY,
            "operator_analysis": maybe(named(record({"evidence": EVIDENCE}, EFFECT))),
            "layer_analysis": maybe(LAYERS),
            "channel_analysis": maybe(CHANNELS),
            "metrics": METRICS,
            "correlations": named(ref("correlation")),
            "format_scores": maybe(FORMAT_SCORES),
            "gate": maybe(GATE),
            "findings": listed(ref("finding")),
            "recommendations": listed(
                record({"priority": TEXT, "component": TEXT, "issue": TEXT, "action": TEXT})
            ),
            "migration_plan": MIGRATION,
            "precision_plan": PRECISION_PLAN,
            "check": CHECK,
            "locate": LOCATE,
            "robustness": record({"operators": listed(TEXT), "levels": listed(LEVEL)}),
            "could_not_see": listed(TEXT),
        },
        "required": ["schema_version", "run", "could_not_see"],
        "$defs": {
            "estimate": ESTIMATE,
            "finding": FINDING,
            "risk": RISK,
            "point": POINT,
            "threshold": THRESHOLD,
            "module": MODULE,
            "correlation": CORRELATION,
        },
    }  # fmt: skip
