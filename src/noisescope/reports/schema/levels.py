"""What was measured: layers, channels, metrics, noise levels, the scores that plans and gates are made from."""

from __future__ import annotations

from noisescope.reports.schema.parts import COUNT, EFFECT, EVIDENCE, NUMBER, TEXT, listed, maybe, named, record, ref

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

LEVEL = record(
    {"noise_level": NUMBER, "accuracy": maybe(ref("estimate"))},
    {**EFFECT, "evidence": EVIDENCE, "retention": maybe(ref("estimate"))},
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
                {"inputs": COUNT, "kind": TEXT},
            )
        ),
        "uniform": named(record({"bits": COUNT, "effective_bits": NUMBER, "predicted_kl": NUMBER})),
    },
    {"error": TEXT, "block_parameters": COUNT},
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
