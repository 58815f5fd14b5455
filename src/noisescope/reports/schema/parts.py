"""The words the schema is written in, and the parts that several sections share."""

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
