"""Names of metrics in sentences."""

from __future__ import annotations

METRIC_NAMES = {
    "accuracy": "accuracy",
    "next_token_accuracy": "next-token accuracy",
    "agreement": "agreement with the clean model",
    "custom": "score",
    "kl": "KL divergence",
    "nll": "loss",
}


def metric_name(metric: str) -> str:
    """A metric as a sentence names it: "costs 12.3 % of the next-token accuracy"."""
    return METRIC_NAMES.get(metric, metric.replace("_", " "))
