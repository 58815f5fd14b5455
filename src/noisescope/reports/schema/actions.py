"""What follows from it: the check by a fault, the plans, the faults that were located."""

from __future__ import annotations

from noisescope.reports.schema.parts import COUNT, EFFECT, NUMBER, PLACE, TEXT, listed, maybe, named, record, ref

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

SUSPECT = record(
    {
        "place": PLACE,
        "operator": TEXT,
        "module": TEXT,
        "tensor": TEXT,
        "occurrence": COUNT,
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

PREDICTION = record(
    {
        "value": NUMBER,
        "low": maybe(NUMBER),
        "high": maybe(NUMBER),
        "n": COUNT,
        "level": NUMBER,
        "largest_standard_error": maybe(NUMBER),
        "scored_tokens": COUNT,
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
    },
    {"planned_share": maybe(NUMBER), "prediction": PREDICTION},
)
