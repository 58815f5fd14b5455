"""A whole report made by hand: every section filled, numbers that can be recognised, nothing measured."""

from __future__ import annotations

from typing import Any

import pytest

from noisescope.diagnosis.findings_check import CheckedWindow, CheckResult
from noisescope.diagnosis.report import (
    Cost,
    DataFacts,
    GivenCommand,
    ModelFacts,
    Robustness,
    RobustnessCurve,
    Run,
    SettingsFacts,
)
from noisescope.diagnosis.rows import (
    AvalanchePoint,
    CellEffect,
    Divergence,
    Effect,
    Interaction,
    LayerAnalysis,
    LayerEffect,
    LevelEffect,
    PointRule,
    WindowEffect,
    as_row,
)
from noisescope.diagnosis.section_types import (
    Baseline,
    ChannelAnalysis,
    ChannelRow,
    CostlyChannel,
    ExecutiveSummary,
    ExpectedCorrelation,
    FormatScore,
    FormatScores,
    GateNumbers,
    GradientRatio,
    HessianTraces,
    Metrics,
    ModuleScores,
    OutlierRules,
    OutlierSummary,
    PlainWords,
    PrimaryMetrics,
    SecondaryMetrics,
    Sparsity,
    Threshold,
    Trace,
    Tried,
    UniformScore,
)
from noisescope.findings import Finding, PointAvalanche, Recommendation, Risk, Target, Term
from noisescope.plans.migration import MigrationPlan, PlaceEvidence, Priority
from noisescope.plans.precision_results import PlanData, PlanRow, PrecisionPlan, Prediction, RandomPlans
from noisescope.reports.saved_report import DiagnosisReport, LocateSection
from noisescope.stats import Correlation, Estimate
from noisescope.trials import Conditions

N = 64


def known(value: float, low: float | None, high: float | None, method: str = "") -> Estimate:
    return Estimate(value, low, high, N, method=method)


def kl(size: float, *, one_sided: bool = False) -> Divergence:
    mean = known(3 * size, 1.5 * size, None if one_sided else 9 * size, "at least" if one_sided else "")
    return Divergence(known(size, size / 2, 2 * size), mean)


def effect(loss: float, band: str, upper: str | None = None, **more: Any) -> Effect:
    return Effect(
        **{
            "evidence": "injected",
            "metric": "next_token_accuracy",
            "predicted_kl": kl(loss / 11, one_sided=True),
            "kl": kl(loss / 10),
            "baseline_acc": 0.9,
            "noisy_acc": 0.9 * (1 - loss),
            "noisy_acc_interval": known(0.9 * (1 - loss), 0.5, 0.95),
            "degradation": known(loss, loss - 0.06, loss + 0.06),
            "nats": loss / 10,
            "band": band,
            "band_upper": upper or band,
            "sensitivity_score": loss / 0.05,
            "p": 0.0,
            "p_corrected": 0.0,
            "smallest_detectable": 0.04,
            "total_injections": 4096,
            "seeds": 2,
            "point_rule": PointRule("CRITICAL", "CRITICAL") if loss > 0.2 else PointRule("HIGH", "MODERATE"),
            **more,
        }
    )


def predicted(size: float) -> Effect:
    return Effect(evidence="predicted", metric="next_token_accuracy", predicted_kl=kl(size), nats=2 * size)


def layer_analysis() -> LayerAnalysis:
    first = Interaction(known(1.7, 1.4, 2.1), "injected")
    places = [("L0-1", 0, effect(0.31, "CRITICAL"), first), ("L2-3", 2, effect(0.12, "MODERATE", "HIGH"), None)]
    ranges = [
        as_row(row, WindowEffect, layer_range=name, start_layer=at, end_layer=at + 1, interaction_index=index)
        for name, at, row, index in places
    ]
    odd = known(4.2, 3.1, 5.5)
    return LayerAnalysis(
        operators=("gemm",),
        window=2,
        step=1,
        windows=tuple(ranges),
        layers=(
            as_row(effect(0.2, "HIGH", injected_over_predicted=odd), LayerEffect, layer=0),
            *(as_row(predicted(0.002 * (layer + 1)), LayerEffect, layer=layer) for layer in (1, 2, 3)),
        ),
        places={"lm_head": effect(0.02, "LOW")},
        map=(
            as_row(effect(0.11, "HIGH"), CellEffect, layer=0, operator="matmul"),
            as_row(predicted(0.0007), CellEffect, layer=3, operator="softmax"),
        ),
        avalanche_points=(
            AvalanchePoint(0, 1, "L0-1", "avalanche", "CRITICAL", known(0.31, 0.25, 0.37), (0.12,),
                           known(2.58, 1.9, 3.6), (0, 0), first),
            AvalanchePoint(2, 3, "L2-3", "borderline", "HIGH", known(0.16, 0.1, 0.22), (0.31,), None, (2, 3), None),
        ),
        compounding=("L0-1",),
        prediction_scale=2.0,
        point_rule_avalanches=(PointAvalanche(0, 1, 0.31, "CRITICAL", (0.12,), (0, 1)),),
    )  # fmt: skip


def run_facts() -> Run:
    return Run(
        model=ModelFacts("demo", "LlamaForCausalLM", "f" * 64, 4, ()),
        data=DataFacts("test.jsonl", "task", N, 1200, "d" * 64, "", "score", 1000),
        settings=SettingsFacts(
            "Gaussian(0.05)", 0.05, ("operator", "layer", "channel"), ("gemm",), ("gemm",), 2, 1, 10.0, (0, 1),
            "standard", 1, 0.1, 0.2, 8
        ),
        metric="next_token_accuracy",
        conditions=Conditions("f" * 64, "float32", "cpu", "eager", 2),
        device="cpu",
        kl_floor=1e-7,
        cost=Cost(12.5, 40, 40, 33.3),
        notes=(),
        finished="2026-01-02T03:04:05+00:00",
        versions={"noisescope": "0.2", "torch": "2.11"},
        host="here",
        store=None,
        command=GivenCommand(
            "diagnose", {"model": "demo", "data": "test.jsonl", "samples": N, "seeds": 2, "effort": "standard",
                         "dtype": "float32", "device": "cpu", "window": 2}, ()
        ),
    )  # fmt: skip


def summary(found: tuple[Finding, ...], points: tuple[AvalanchePoint, ...]) -> ExecutiveSummary:
    risk = Risk("report_risk", 55.0, "MODERATE", "targeted fixes recommended", (Term("critical operator: gemm", 30.0),))
    dashboard = Risk("dashboard_risk", 50.0, "MODERATE", "needs fixes first", (Term("degradation 0.3", None),))
    return ExecutiveSummary(
        critical_operators=("gemm",),
        borderline_operators=("softmax",),
        num_critical_operators=1,
        avalanche_points=points,
        num_avalanche_points=1,
        total_outlier_channels=3,
        overall_risk_level="HIGH",
        risk_meaning="validate much of it on the hardware",
        report_risk=risk,
        dashboard_risk=dashboard,
        whole_model=None,
        top_findings=found[:3],
        next_step="Validate layers 0 to 1 on the target hardware first.",
        in_plain_words=PlainWords("It is fragile.", "Keep layer 0 in 16 bits.", ""),
    )


def findings() -> tuple[Finding, ...]:
    return (
        Finding(
            "CRITICAL", "layers 0 to 1", "noise here costs 31.0 % of the next-token accuracy",
            Target("window", ("gemm",), (0, 1)), known(0.31, 0.25, 0.37), "share", 0.03, "injected",
            ("layer 0 alone costs 20.0 %",),
        ),
        Finding(
            "not rated", "layer 3, softmax", "predicted to diverge by 0.0007 nats per token",
            Target("cell", ("softmax",), (3,)), known(0.0007, 0.0003, 0.0014), "nats", 0.0007, "predicted",
        ),
        Finding(
            "MODERATE", "model.layers.0.mlp", "3 of 96 channels are outliers", Target("channels", module="model"),
            Estimate(23.0, None, None, 128), "ratio", None, "captured",
        ),
    )  # fmt: skip


def metrics() -> Metrics:
    threshold = Threshold(0.03, "0.03", 0.02, 0.05, "HIGH", 0.1, N, (Tried(0.1, 0.4), Tried(0.02, 0.85)))
    risk = Risk("dashboard_risk", 50.0, "MODERATE", "needs fixes first", ())
    return Metrics(
        primary=PrimaryMetrics(known(0.31, 0.25, 0.37), "CRITICAL", known(3.2, 2.7, 4.0), "POOR", threshold),
        secondary=SecondaryMetrics(
            known(29.0, 28.0, 31.0), "FAIR", "GOOD", 26.0, GradientRatio(1.2, "MODERATE", 16, 2, {"0": 1.3, "1": None}),
            Sparsity(0.01, 0.05, "DENSE"),
        ),
        critical_thresholds={"gemm": threshold},
        hessian_trace=HessianTraces("", {"0": Trace(12.5, 8.0, 17.0, 1e-4, 8), "1": Trace(3.5, None, None, 2e-5, 8)}),
        fisher={"gemm": kl(0.03)},
        baseline=Baseline({"next_token_accuracy": known(0.9, 0.8, 0.95), "nll": known(1.2, 1.0, 1.4)}, 0, True, 0.01),
        risk=risk,
    )  # fmt: skip


def channels() -> ChannelAnalysis:
    row = ChannelRow(
        layer=0, operator="linear", module="model.layers.0.mlp.down_proj", occurrence=0, outlier_indices=(7, 31),
        outlier_ratios=(23.0, 11.0), num_outliers=2, total_channels=96, outlier_percentage=2.1, nonfinite_channels=0,
        max_ratio=23.0, band="HIGH", median_max=1.5, global_max=34.5, rules=OutlierRules(2, 1, 0, None), sparsity=0.01,
        relative_sparsity=0.05, count=4096,
    )  # fmt: skip
    costly = CostlyChannel("model.layers.0.mlp.down_proj", 0, 7, 0.004, "injected", kl(0.005), 1.25)
    total = OutlierSummary(1, 2, 960, 0.21, 0, 23.0, 34.5)
    return ChannelAnalysis("captured", "", 128, 10.0, total, {"model.layers.0.mlp.down_proj": row}, (costly,))


def expected() -> dict[str, ExpectedCorrelation]:
    strong = Correlation("spearman", 0.95, 0.8, 0.99, 0.001, 12)
    weak = Correlation("spearman", 0.62, 0.1, 0.9, 0.03, 12)
    return {
        "hessian_sensitivity": ExpectedCorrelation(strong, "degradation", "r > 0.7", "yes", 0.2, True),
        "outliers_sensitivity": ExpectedCorrelation(weak, "degradation", "r > 0.6", "undecided", 0.6, False),
    }


def format_scores() -> FormatScores:
    scores = {"int8": FormatScore(8, 8.25, 1e-4, 2e-5), "int4": FormatScore(4, 4.25, 0.02, None)}
    module = ModuleScores("model.layers.0.mlp.down_proj", 0, 9216, 96, "mlp", scores)
    uniform = {"int8": UniformScore(8, 8.25, 1e-4), "int4": UniformScore(4, 4.25, 0.02)}
    return FormatScores(16, "", (module,), uniform, 9216)


def migration_plan() -> MigrationPlan:
    def group(priority: Any, place: int | str, precision: str, reasons: tuple[str, ...]) -> Priority:
        layers, places = ((place,), ()) if isinstance(place, int) else ((), (place,))
        evidence = (PlaceEvidence(place, reasons, 0.02, 0.31, 34.5),)
        return Priority(priority, layers, places, {str(place): precision}, "compare outputs", 0.05, evidence)

    first = group(1, 0, "FP16", ("finding 1", "noise in it alone costs 20.0 %", "a third reason"))
    return MigrationPlan((first, group(2, "lm_head", "BF16", ("x",)), group(3, 3, "INT8 or BF16", ())), "raise it", ())


def precision_plan() -> PrecisionPlan:
    def row(name: str, kind: Any, size: float) -> PlanRow:
        accuracy = known(0.88, 0.8, 0.93)
        over = None if kind == "plan" else known(2.0, 1.5, 3.0)
        return PlanRow(name, kind, None, 5.0, 5.25, size, kl(size), accuracy, 0.9, over)

    rows = (row("plan", "plan", 0.01), row("uniform int4", "uniform", 0.02), row("bit rule", "bit rule", 0.03))
    return PrecisionPlan(
        "optimal", {"model.layers.0.mlp.down_proj": "int4"}, {"int4": 1}, 5.0, 5.25, 0.01, 0.012, "",
        Prediction(0.012, 0.008, 0.016, 16, 0.95, 0.002, 300), 0.9, True, 0.03, 0.01, 0.02, "int4", 0.03, 5.0,
        RandomPlans(16, 0.04), rows, PlanData(48, 900, "e" * 64), ("a note on the plan",),
    )  # fmt: skip


def located() -> LocateSection:
    suspect = {
        "place": 1, "operator": "linear", "module": "model.layers.1.mlp.up_proj", "tensor": "output", "occurrence": 0,
        "channels": [3], "period": None, "fault_class": "stuck bit", "confidence": 0.97, "evidence": "12 ulp off",
        "phase": "", "score": 9.0, "details": {"bit": 16}, "rows": [[0, 5]], "row_words": "token 5",
        "class_confidence": 0.9, "also": [],
    }  # fmt: skip
    verdict = {
        "verdict": "faulty", "method": "audit", "suspects": [suspect], "smallest_visible": {"gain": 1e-4},
        "forwards": 2, "checked": 88, "notes": ["a note"], "unseen": ["norm at block 2"],
        "headline": "faulty: linear at block 1", "coverage": {"modules": 1.0},
    }  # fmt: skip
    return LocateSection.of(verdict, simulated="stuck_bit:bit=16@1", elements_changed=512)


def diagnosis_report() -> DiagnosisReport:
    layers, found = layer_analysis(), findings()
    checked = as_row(effect(0.33, "HIGH"), CheckedWindow, role="warned", start_layer=0, end_layer=1, reported_kl=0.031)
    return DiagnosisReport(
        run=run_facts(),
        executive_summary=summary(found, layers.avalanche_points),
        operator_analysis={
            "gemm": effect(0.31, "CRITICAL", selected=known(0.29, 0.21, 0.37)),
            "softmax": effect(0.12, "MODERATE", "HIGH"),
            "gelu": Effect(evidence="absent", metric="next_token_accuracy"),
            "norm": Effect(evidence="failed", metric="next_token_accuracy", error="out of memory"),
        },
        layer_analysis=layers,
        channel_analysis=channels(),
        metrics=metrics(),
        correlations=expected(),
        format_scores=format_scores(),
        gate=GateNumbers(("a", "b"), "Gaussian(0.05)", (0, 1), "next_token_accuracy", 0.01, {"gemm": (0.1, None)},
                         {"gemm": (0.2, 0.3)}, {"gemm": (1.0, 0.0)}, 0),
        findings=found,
        recommendations=(Recommendation("HIGH", "layers 0 to 1", "31.0 % lost", "raise the precision"),),
        could_not_see=("a loss below 4.0 % could have been missed",),
        migration_plan=migration_plan(),
        precision_plan=precision_plan(),
        check=CheckResult("4-bit integers", ("linear",), 100, (checked,)),
        locate=located(),
    )  # fmt: skip


def robustness_report() -> Robustness:
    def level(at: float, score: float, band: str) -> LevelEffect:
        accuracy, kept = known(score, score - 0.05, min(1.0, score + 0.05)), known(score / 0.9, 0.5, 1.0)
        return as_row(effect(1 - score / 0.9, band), LevelEffect, noise_level=at, accuracy=accuracy, retention=kept)

    levels = (level(0.0, 0.9, "LOW"), level(0.05, 0.7, "HIGH"), level(0.1, 0.3, "CRITICAL"))
    return Robustness(run=run_facts(), robustness=RobustnessCurve(("gemm",), levels), could_not_see=("a limit",))


@pytest.fixture(scope="session")
def made() -> DiagnosisReport:
    return diagnosis_report()


@pytest.fixture(scope="session")
def made_curve() -> Robustness:
    return robustness_report()
