"""Diagnoses made by hand, with only what a test is about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from noisescope.diagnosis.report import Asked, Cost, DataFacts, Diagnosis, ModelFacts, Run, SettingsFacts
from noisescope.diagnosis.rows import AvalanchePoint, Divergence, Effect, LayerAnalysis, LayerEffect, WindowEffect
from noisescope.diagnosis.section_types import (
    ChannelAnalysis,
    ChannelRow,
    ExecutiveSummary,
    FormatScore,
    FormatScores,
    Metrics,
    ModuleScores,
    OutlierRules,
    PlainWords,
    PrimaryMetrics,
    SecondaryMetrics,
)
from noisescope.findings import Finding, Risk, Target, band
from noisescope.stats import Estimate
from noisescope.trials import Conditions

RISK = Risk("report_risk", 0.0, "LOW", "", ())


def estimate(value: float | None, low: float | None = None, high: float | None = None, n: int = 50) -> Estimate:
    return Estimate(value, low, high, n)


def divergence(nats: float) -> Divergence:
    return Divergence(estimate(nats), estimate(2 * nats))


def effect(nats: float = 1e-3, loss: float | None = 0.0, p: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """What an injection of noise did; the interval of the loss is a fifth of it to either side."""
    lost = None if loss is None else estimate(loss, 0.8 * loss, 1.2 * loss)
    return {
        "evidence": "injected", "kl": divergence(nats), "nats": nats, "degradation": lost, "p_corrected": p, **more,
    }  # fmt: skip


def layer(number: int, *args: Any, **more: Any) -> LayerEffect:
    return LayerEffect(layer=number, **effect(*args, **more))


def window(start: int, end: int, *args: Any, **more: Any) -> WindowEffect:
    return WindowEffect(
        layer_range=f"L{start}-{end}", start_layer=start, end_layer=end, interaction_index=None, **effect(*args, **more)
    )


def layers(*rows: LayerEffect, windows: Any = (), places: Any = None, points: Any = ()) -> LayerAnalysis:
    return LayerAnalysis(
        operators=("gemm",), window=3, step=1, windows=tuple(windows), layers=rows, places=places or {}, map=(),
        avalanche_points=tuple(points), compounding=(), prediction_scale=1.0, point_rule_avalanches=(),
    )  # fmt: skip


def point(
    start: int, end: int, common: tuple[int, int], loss: float = 0.25, state: Any = "avalanche"
) -> AvalanchePoint:
    interval = estimate(loss, loss - 0.05, loss + 0.05)
    return AvalanchePoint(
        start, end, f"L{start}-{end}", state, "CRITICAL", interval, (0.01,), estimate(3.0, 2.0, 4.0), common, None
    )


def channels(
    place: Any, ratio: float = 2.0, operator: str = "linear", *, module: str = "", largest: float = 9.0, **more: Any
) -> ChannelRow:
    known: dict[str, Any] = {
        "layer": place, "operator": operator, "module": module or f"layers.{place}.mlp", "occurrence": 0,
        "outlier_indices": (7,) if ratio > 10 else (), "outlier_ratios": (ratio,), "num_outliers": int(ratio > 10),
        "total_channels": 64, "outlier_percentage": 0.0, "nonfinite_channels": 0, "max_ratio": ratio,
        "band": band("outlier_ratio", ratio), "median_max": 1.0, "global_max": largest,
        "rules": OutlierRules(0, 0, 0, None), "sparsity": 0.0, "relative_sparsity": 0.0, "count": 10,
    }  # fmt: skip
    return ChannelRow(**{**known, **more})


def captured(*rows: ChannelRow) -> ChannelAnalysis:
    """Rows by the name that a report gives them."""
    named = {
        row.module
        + ("" if row.operator == "linear" else f" ({row.operator})")
        + (f" #{row.occurrence}" if row.occurrence else ""): row
        for row in rows
    }
    return ChannelAnalysis("captured", "", 8, 10.0, None, named, ())


def finding(
    severity: str, target: Target, nats: float = 0.1, statement: str = "noise here costs much", unit: Any = "share"
) -> Finding:
    return Finding(severity, target.name, statement, target, estimate(0.2, 0.15, 0.25), unit, nats, "injected")


def module_scores(name: str, place: int = 0, costs: Any = None, **more: Any) -> ModuleScores:
    """Predicted KL by format; bits come from the digits of its name."""
    formats = {
        form: FormatScore(bits, bits + 0.25, *cost)
        for form, cost in (costs or {}).items()
        for bits in [int("".join(filter(str.isdigit, form)))]
    }
    known = {"module": name, "place": place, "parameters": 10, "inputs": 64, "kind": "Linear", "formats": formats}
    return ModuleScores(**{**known, **more})


def scores(*modules: ModuleScores, n: int = 4, error: str = "", weights: int | None = None) -> FormatScores:
    total = sum(module.parameters for module in modules)
    return FormatScores(n, error, modules, {}, total if weights is None else weights)


def asked(
    *,
    blocks: int = 12,
    architecture: str = "LlamaForCausalLM",
    data: str = "gsm8k.jsonl",
    kind: str = "answer",
    samples: int = 8,
    tokens: int = 24,
    **conditions: Any,
) -> dict[str, Any]:
    return {
        "model": ModelFacts("my models/llama", architecture, "abc", blocks, ()),
        "data": DataFacts(data, kind, samples, tokens, "def", "", "score"),
        "settings": SettingsFacts(
            "Gaussian(scale=0.05)", 0.05, ("operator", "layer", "channel"), ("gemm",), ("gemm",), 3, 1, 10.0, (0,),
            "standard", 2, 0.1, 0.2, 8,
        ),
        "metric": "accuracy",
        "conditions": Conditions(
            **{"model": "abc", "dtype": "bfloat16", "device": "cpu", "attention": "sdpa", "engine": 1, **conditions}
        ),
        "device": "cpu",
        "kl_floor": 1e-10,
    }  # fmt: skip


def summary(**changed: Any) -> ExecutiveSummary:
    known: dict[str, Any] = {
        "critical_operators": (), "borderline_operators": (), "num_critical_operators": 0, "avalanche_points": (),
        "num_avalanche_points": 0, "total_outlier_channels": None, "overall_risk_level": "LOW", "risk_meaning": "",
        "report_risk": RISK, "dashboard_risk": RISK, "top_findings": (), "next_step": "",
        "in_plain_words": PlainWords("", "", ""),
    }  # fmt: skip
    return ExecutiveSummary(**{**known, **changed})


def metrics() -> Metrics:
    primary = PrimaryMetrics(None, "not measurable", None, "not measurable", None)
    return Metrics(
        primary,
        SecondaryMetrics(None, "not measurable", "not measurable", 26.0, None, None),
        {},
        None,
        None,
        None,
        RISK,
    )


def diagnosis(run: dict[str, Any] | None = None, **sections: Any) -> Diagnosis:
    """A diagnosis that has those sections alone."""
    ended = Run(**(run or asked()), cost=Cost(1.0, 1, 1, 1.0), notes=(), finished="today", versions={}, host="here",
                store=None)  # fmt: skip
    known: dict[str, Any] = {
        "operator_analysis": None, "layer_analysis": None, "channel_analysis": None, "correlations": {},
        "format_scores": None, "gate": None, "findings": (), "recommendations": (), "could_not_see": (),
        "executive_summary": summary(), "metrics": metrics(),
    }  # fmt: skip
    return Diagnosis(run=ended, **{**known, **sections})


@pytest.fixture(scope="session")
def made() -> Any:
    """Everything above."""
    return SimpleNamespace(
        asked=lambda **about: Asked(**asked(**about)), about=asked, captured=captured, channels=channels,
        diagnosis=diagnosis, divergence=divergence, effect=lambda *args, **more: Effect(**effect(*args, **more)),
        estimate=estimate, finding=finding, layer=layer, layers=layers, module_scores=module_scores, point=point,
        scores=scores, summary=summary, window=window,
    )  # fmt: skip
