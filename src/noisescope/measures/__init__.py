"""Measurements: divergence of outputs, scores per token and sample, curvature, signals. Numbers, never verdicts."""
