"""The JSON Schema of a report (draft 2020-12), built here so that its parts are named once. Published in docs/.

Strict where readers rely on it (names, types, an n and an interval with every estimate), open where later parts add
sections of their own.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

NUMBER: Schema = {"type": "number"}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
PLACE: Schema = {"type": ["integer", "string"]}  # a block's index, or embed, lm_head ...
EVIDENCE: Schema = {"enum": ["injected", "predicted", "captured", "failed", "absent", "none"]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def named(schema: Schema) -> Schema:
    """An object whose keys are names of things."""
    return {"type": "object", "additionalProperties": schema}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, *, closed: bool = True) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": not closed,
    }


ESTIMATE = record(
    {"value": maybe(NUMBER), "low": maybe(NUMBER), "high": maybe(NUMBER), "n": COUNT},
    {"level": NUMBER, "note": TEXT, "of": TEXT},
)

EFFECT = {  # what noise in one place did: see docs/numbers.md
    "predicted_kl": ref("estimate"),
    "kl": ref("estimate"),
    "baseline_acc": maybe(NUMBER),
    "noisy_acc": maybe(NUMBER),
    "noisy_acc_interval": ref("estimate"),
    "degradation": ref("estimate"),
    "band": TEXT,
    "sensitivity_score": maybe(NUMBER),
    "sensitivity_band": TEXT,
    "noise_tolerance_index": ref("estimate"),
    "agreement": ref("estimate"),
    "nll": ref("estimate"),
    "snr_db": ref("estimate"),
    "injected_over_predicted": maybe(ref("estimate")),
    "parted": {"type": "boolean"},
    "p": maybe(NUMBER),
    "p_corrected": maybe(NUMBER),
    "smallest_detectable": maybe(NUMBER),
    "total_injections": COUNT,
    "seeds": COUNT,
    "nonfinite": COUNT,
    "failed_samples": COUNT,
    "error": TEXT,
}

FINDING = record(
    {
        "severity": TEXT,
        "component": TEXT,
        "statement": TEXT,
        "value": maybe(NUMBER),
        "interval": maybe({"type": "array", "prefixItems": [maybe(NUMBER), maybe(NUMBER)], "minItems": 2}),
        "n": COUNT,
        "evidence": EVIDENCE,
    }
)

RISK = record(
    {
        "name": TEXT,
        "score": NUMBER,
        "level": TEXT,
        "meaning": TEXT,
        "terms": listed(record({"reason": TEXT, "points": maybe(NUMBER)})),
    }
)

POINT = record(
    {
        "start": COUNT,
        "end": COUNT,
        "layer_range": TEXT,
        "degradation": NUMBER,
        "severity": TEXT,
        "sure": {"type": "boolean"},
        "interval": ref("estimate"),
    },
    {
        "neighbours": listed(NUMBER),
        "common": maybe(listed(COUNT)),
        "interaction_index": maybe(ref("estimate")),
    },
)

THRESHOLD = record(
    {"value": maybe(NUMBER), "label": TEXT, "band": TEXT, "n": COUNT, "target_degradation": NUMBER},
    {
        "low": maybe(NUMBER),
        "high": maybe(NUMBER),
        "note": TEXT,
        "tried": listed(record({"scale": NUMBER, "accuracy": maybe(NUMBER)}, closed=False)),
    },
    closed=False,
)

MODULE = record(
    {
        "layer": {},
        "operator": TEXT,
        "outlier_indices": listed(COUNT),
        "outlier_ratios": listed(NUMBER),
        "num_outliers": COUNT,
        "total_channels": COUNT,
        "outlier_percentage": NUMBER,
        "nonfinite_channels": COUNT,
        "max_ratio": NUMBER,
        "band": TEXT,
        "rules": named(COUNT),
    },
    closed=False,
)

CORRELATION = record(
    {"value": maybe(NUMBER), "n": COUNT},
    {
        "method": TEXT,
        "low": maybe(NUMBER),
        "high": maybe(NUMBER),
        "level": NUMBER,
        "p": maybe(NUMBER),
        "note": TEXT,
        "against": TEXT,
        "expected": TEXT,
        "held": maybe({"type": "boolean"}),
    },
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

LAYERS = record(
    {
        "operators": listed(TEXT),
        "window": COUNT,
        "step": COUNT,
        "windows": listed(
            record(
                {"layer_range": TEXT, "start_layer": COUNT, "end_layer": COUNT, "evidence": EVIDENCE},
                {**EFFECT, "interaction_index": maybe(ref("estimate"))},
            )
        ),
        "layers": listed(record({"layer": COUNT, "evidence": EVIDENCE}, EFFECT)),
        "places": named(record({"evidence": EVIDENCE}, EFFECT)),
        "map": listed(record({"layer": COUNT, "operator": TEXT, "evidence": EVIDENCE}, EFFECT)),
        "avalanche_points": listed(ref("point")),
        "compounding": listed(TEXT),
    }
)

CHANNELS = record(
    {"costliest": listed(record({"module": TEXT, "channel": COUNT, "predicted_nats": NUMBER}, closed=False))},
    {"evidence": EVIDENCE, "error": TEXT, "n": COUNT, "threshold": NUMBER, "summary": {"type": "object"},
     "per_layer": named(ref("module"))},
)  # fmt: skip

METRICS = record(
    {
        "primary": record(
            {
                "relative_degradation": maybe(ref("estimate")),
                "degradation_band": TEXT,
                "noise_tolerance_index": maybe(ref("estimate")),
                "noise_tolerance_band": TEXT,
                "critical_threshold": maybe(ref("threshold")),
            }
        ),
        "secondary": record(
            {"snr_db": maybe(ref("estimate")), "snr_band": TEXT, "gradient_ratio": {}, "activation_sparsity": {}},
            {"nominal_snr_db": maybe(NUMBER)},
        ),
        "critical_thresholds": named(maybe(ref("threshold"))),
        "hessian_trace": {"type": ["object", "null"]},
        "fisher": {"type": ["object", "null"]},
        "baseline": {"type": ["object", "null"]},
        "risk": ref("risk"),
    }
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

LEVEL = record(
    {"noise_level": NUMBER, "accuracy": maybe(ref("estimate"))},
    {**EFFECT, "evidence": EVIDENCE, "retention": maybe(ref("estimate"))},
)


CHECK = record(
    {
        "fault": TEXT,
        "operators": listed(TEXT),
        "samples": COUNT,
        "windows": listed(
            record(
                {
                    "role": {"enum": ["warned", "between", "least"]},
                    "start_layer": COUNT,
                    "end_layer": COUNT,
                    "reported_kl": NUMBER,
                },
                EFFECT,
            )
        ),
    }
)


FORMAT_SCORES = record(
    {
        "n": COUNT,
        "modules": listed(
            record(
                {
                    "module": TEXT,
                    "place": COUNT,
                    "parameters": COUNT,
                    "formats": named(
                        record(
                            {
                                "bits": COUNT,
                                "effective_bits": NUMBER,
                                "predicted_kl": NUMBER,
                                "standard_error": maybe(NUMBER),
                            }
                        )
                    ),
                },
                {"inputs": COUNT},
            )
        ),
        "uniform": named(record({"bits": COUNT, "effective_bits": NUMBER, "predicted_kl": NUMBER})),
    },
    {"error": TEXT},
)


SUSPECT = record(
    {
        "place": PLACE,
        "operator": TEXT,
        "module": TEXT,
        "channels": listed(COUNT),
        "period": maybe(COUNT),
        "fault_class": TEXT,
        "confidence": NUMBER,
        "evidence": TEXT,
        "score": NUMBER,
        "details": {"type": "object"},
    }
)

LOCATE = record(
    {
        "verdict": {"enum": ["healthy", "faulty", "undecided"]},
        "method": TEXT,
        "suspects": listed(SUSPECT),
        "smallest_visible": {"type": "object"},
        "forwards": NUMBER,
        "checked": COUNT,
        "notes": listed(TEXT),
        "unseen": listed(TEXT),
    },
    {"simulated": TEXT, "elements_changed": COUNT},
)

MIGRATION = record(
    {
        "priorities": listed(
            record(
                {
                    "priority": {"enum": [1, 2, 3]},
                    "layers": listed(COUNT),
                    "places": listed(TEXT),
                    "precision": named(TEXT),
                    "validation": TEXT,
                    "max_mape": maybe(NUMBER),
                    "evidence": listed(
                        record(
                            {
                                "place": PLACE,
                                "reasons": listed(TEXT),
                                "nats": NUMBER,
                                "loss": maybe(NUMBER),
                                "largest_activation": maybe(NUMBER),
                            }
                        )
                    ),
                }
            )
        ),
        "fallback": TEXT,
        "notes": listed(TEXT),
    }
)

PRECISION_PLAN = record(
    {
        "method": TEXT,
        "assignment": named(TEXT),
        "counts": named(COUNT),
        "average_bits": NUMBER,
        "effective_bits": NUMBER,
        "megabytes": NUMBER,
        "predicted_kl": NUMBER,
        "kl": NUMBER,
        "uniform_kl": maybe(NUMBER),
        "uniform_format": maybe(TEXT),
        "seeds_rule_kl": maybe(NUMBER),
        "seeds_rule_bits": maybe(NUMBER),
        "random": record({"n": COUNT, "median_kl": maybe(NUMBER)}),
        "rows": listed(
            record(
                {
                    "name": TEXT,
                    "average_bits": NUMBER,
                    "effective_bits": NUMBER,
                    "predicted_kl": NUMBER,
                    "kl": ref("estimate"),
                    "accuracy": ref("estimate"),
                },
                closed=False,
            )
        ),
        "data": record({"samples": COUNT}, closed=False),
        "notes": listed(TEXT),
        "note": TEXT,
    }
)

PER_SAMPLE = named(listed(maybe(NUMBER)))  # by operator

GATE = record(
    {
        "samples": listed(TEXT),
        "noise": TEXT,
        "seeds": listed(COUNT),
        "metric": TEXT,
        "chance": NUMBER,
        "predicted_kl": PER_SAMPLE,
        "kl": PER_SAMPLE,
        "accuracy": PER_SAMPLE,
        "nonfinite": COUNT,
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
