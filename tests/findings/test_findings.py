"""Bands on and beside their limits, the two risk scores, avalanche points and advice."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope import findings as f
from noisescope.errors import InvalidInput
from noisescope.estimate import Estimate
from noisescope.findings import Finding, Recommendation, Target, Window, finding, thresholds
from noisescope.jsonform import from_json, to_json
from noisescope.sites import GROUPS, OPERATORS

EPSILON = 1e-9

# metric: values just below, on and just above each limit -> names
ON_THE_LIMITS: dict[str, list[tuple[float, str, str, str]]] = {
    "degradation": [
        (0.05, "LOW", "MODERATE", "MODERATE"),
        (0.10, "MODERATE", "MODERATE", "HIGH"),
        (0.20, "HIGH", "HIGH", "CRITICAL"),
    ],
    "window": [
        (0.05, "ROBUST", "MODERATE", "MODERATE"),
        (0.10, "MODERATE", "MODERATE", "HIGH"),
        (0.15, "HIGH", "HIGH", "AVALANCHE"),
        (0.20, "AVALANCHE", "AVALANCHE", "CRITICAL"),
    ],
    "sensitivity_score": [(1.5, "ROBUST", "MODERATE", "MODERATE"), (3.0, "MODERATE", "MODERATE", "CRITICAL")],
    "outlier_ratio": [
        (10, "NORMAL", "NORMAL", "MODERATE"),
        (20, "MODERATE", "MODERATE", "HIGH"),
        (50, "HIGH", "HIGH", "CRITICAL"),
    ],
    "noise_tolerance_index": [
        (5, "POOR", "FAIR", "FAIR"),
        (10, "FAIR", "GOOD", "GOOD"),
        (20, "GOOD", "GOOD", "EXCELLENT"),
    ],
    "critical_threshold": [
        (0.02, "CRITICAL", "HIGH", "HIGH"),
        (0.05, "HIGH", "MODERATE", "MODERATE"),
        (0.10, "MODERATE", "MODERATE", "LOW"),
    ],
    "snr_db": [(20, "POOR", "FAIR", "FAIR"), (30, "FAIR", "GOOD", "GOOD"), (40, "GOOD", "GOOD", "EXCELLENT")],
    "gradient_ratio": [
        (0.5, "CRITICAL", "CONCERNING", "CONCERNING"),
        (0.7, "CONCERNING", "MODERATE", "MODERATE"),
        (0.9, "MODERATE", "STABLE", "STABLE"),
        (1.1, "STABLE", "STABLE", "MODERATE"),
        (1.3, "MODERATE", "MODERATE", "CONCERNING"),
        (1.5, "CONCERNING", "CONCERNING", "CRITICAL"),
    ],
    "sparsity": [(0.3, "DENSE", "MIXED", "MIXED"), (0.7, "MIXED", "MIXED", "SPARSE")],
    "mae": [
        (1e-4, "NEGLIGIBLE", "ACCEPTABLE", "ACCEPTABLE"),
        (1e-3, "ACCEPTABLE", "ACCEPTABLE", "NOTICEABLE"),
        (1e-2, "NOTICEABLE", "NOTICEABLE", "CRITICAL"),
    ],
    "mape": [
        (0.01, "EXCELLENT", "GOOD", "GOOD"),
        (0.05, "GOOD", "GOOD", "MODERATE"),
        (0.10, "MODERATE", "MODERATE", "SIGNIFICANT"),
    ],
    "pearson": [
        (0.90, "POOR", "MODERATE", "MODERATE"),
        (0.95, "MODERATE", "GOOD", "GOOD"),
        (0.99, "GOOD", "GOOD", "EXCELLENT"),
    ],
    "report_risk": [(50, "LOW", "LOW", "MODERATE"), (100, "MODERATE", "MODERATE", "HIGH")],
    "dashboard_risk": [(30, "LOW", "LOW", "MODERATE"), (60, "MODERATE", "MODERATE", "HIGH")],
}


@pytest.mark.parametrize("metric", f.BANDS)
def test_bands_at_their_limits(metric: str) -> None:
    """Each band ends where the notes say: below, on and above every limit."""
    cases = ON_THE_LIMITS[metric]
    assert [limit for limit, *_ in cases] == list(f.BANDS[metric].limits)
    for limit, *names in cases:
        values = (limit * (1 - EPSILON), limit, limit * (1 + EPSILON))
        assert [f.band(metric, value) for value in values] == names, (metric, limit)


@pytest.mark.parametrize("metric", f.BANDS)
@pytest.mark.parametrize("value", [None, math.nan])
def test_what_was_not_measured_has_no_band(metric: str, value: float | None) -> None:
    """None and NaN are "not measurable" everywhere, never a good band."""
    assert f.band(metric, value) == f.meaning(metric, value) == f.NOT_MEASURABLE


def test_no_loss_and_a_gain_have_bands() -> None:
    """Zero, negative and infinite numbers are numbers."""
    assert f.band("degradation", 0.0) == f.band("degradation", -0.02) == "LOW"
    assert f.band("noise_tolerance_index", math.inf) == "EXCELLENT"
    assert f.band("critical_threshold", 0.2) == "LOW"
    assert f.meaning("degradation", 0.12) != f.meaning("degradation", 0.3)


@given(st.floats(1e-3, 1e3))
def test_tolerance_and_degradation_tell_the_same(loss: float) -> None:
    """A degradation and its noise tolerance index lie in bands of the same rank, also on the shared limits."""
    ranks = {"LOW": "EXCELLENT", "MODERATE": "GOOD", "HIGH": "FAIR", "CRITICAL": "POOR"}
    for d in (loss, 0.05, 0.1, 0.2):
        if d not in (0.05, 0.1, 0.2) and any(abs(d - limit) < 1e-9 for limit in (0.05, 0.1, 0.2)):
            continue
        assert f.band("noise_tolerance_index", 1 / d) == ranks[f.band("degradation", d)]


def test_limits_agree_with_bands() -> None:
    """A limit that stands in both tables is the same number."""
    assert f.LIMITS["avalanche_degradation"] in f.BANDS["window"].limits
    assert f.LIMITS["avalanche_critical"] == f.BANDS["window"].limits[-1]
    assert f.LIMITS["critical_operator_score"] == f.BANDS["sensitivity_score"].limits[-1]
    assert f.LIMITS["outlier_channel_ratio"] == f.BANDS["outlier_ratio"].limits[0]
    for name in ("degradation", "mape"):
        assert {limit for limit, _ in f.DASHBOARD_POINTS[name]} <= set(f.BANDS[name].limits)


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        (thresholds.LossBand, ("degradation", "window")),
        (thresholds.ScoreBand, ("sensitivity_score",)),
        (thresholds.OutlierBand, ("outlier_ratio",)),
        (thresholds.QualityBand, ("noise_tolerance_index",)),
        (thresholds.QualityBand, ("snr_db",)),
        (thresholds.ThresholdBand, ("critical_threshold",)),
        (thresholds.GradientBand, ("gradient_ratio",)),
        (thresholds.SparsityBand, ("sparsity",)),
        (thresholds.RiskLevel, ("report_risk",)),
        (thresholds.RiskLevel, ("dashboard_risk",)),
    ],
)
def test_the_types_of_bands_have_their_names(kind: Any, metrics: tuple[str, ...]) -> None:
    """What rows accept is what the table of bands can give, no more and no less."""
    names = {name for metric in metrics for name in f.BANDS[metric].names}
    assert set(typing.get_args(kind)) == {*names, "not measurable"}


def test_severities_and_priorities_have_types() -> None:
    """In the order that ranks them."""
    assert typing.get_args(finding.Severity) == f.SEVERITIES and typing.get_args(finding.Urgency) == f.PRIORITIES


def test_unknown_metric_is_named() -> None:
    """A misspelt metric gets the nearest name."""
    with pytest.raises(InvalidInput, match="Did you mean 'degradation'"):
        f.band("degredation", 0.1)


def test_expected_correlations() -> None:
    """The signs are those of degradation: sparsity should lower it. None stays None."""
    assert f.as_expected("hessian_sensitivity", 0.71) is True
    assert f.as_expected("hessian_sensitivity", 0.7) is False
    assert f.as_expected("outliers_sensitivity", 0.61) is True
    assert f.as_expected("sparsity_degradation", -0.6) is True
    assert f.as_expected("sparsity_degradation", 0.6) is False
    assert f.as_expected("sparsity_degradation", None) is None
    with pytest.raises(InvalidInput, match="unknown correlation"):
        f.as_expected("sparsity", 0.6)


# ---- risk -----------------------------------------------------------------------------------------------------------


def test_report_risk_adds_up() -> None:
    """30 an operator strictly above 3.0, 25 an avalanche point, 5 a percent of the real channels."""
    risk = f.report_risk({"softmax": 4.4, "norm": 3.6, "gemm": 3.0, "silu": 0.6}, 1, 342, 34_200)
    assert (risk.name, risk.score, risk.level) == ("report_risk", 2 * 30 + 25 + 5, "MODERATE")
    assert [term.points for term in risk.terms] == [30, 30, 25, 5]
    assert "softmax" in risk.terms[0].reason and "34200" in risk.terms[-1].reason
    fewer = f.report_risk({"softmax": 4.4, "norm": 3.6, "gemm": 3.0, "silu": 0.6}, 1, 342, 342 * 20)
    assert (fewer.score, fewer.level) == (110, "HIGH")
    clean = f.report_risk({"softmax": 0.1}, 0, 0, 4096)
    assert (clean.score, clean.level, clean.terms) == (0, "LOW", ())


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (({"softmax": None, "silu": 0.1}, 0, 0, 64), f.NOT_MEASURABLE),
        (({"softmax": math.nan}, 0, 0, 64), f.NOT_MEASURABLE),
        (({}, 0, 0, 64), f.NOT_MEASURABLE),
        (({"softmax": 0.1}, None, 0, 64), f.NOT_MEASURABLE),
        (({"softmax": 0.1}, 0, None, None), f.NOT_MEASURABLE),
        (({"softmax": 9.0, "silu": None}, 1, 0, 64), "MODERATE"),
        (({"softmax": 9.0, "silu": None}, 3, 0, 64), "HIGH"),
    ],
)
def test_a_missing_part_is_never_low_risk(arguments: Any, level: str) -> None:
    """What was not measured can't make a model safe; what is known to be bad stays bad."""
    risk = f.report_risk(*arguments)
    assert risk.level == level
    assert any(term.points is None for term in risk.terms)


def test_impossible_channel_counts_are_refused() -> None:
    """More outliers than channels means that the count of channels was guessed."""
    with pytest.raises(InvalidInput, match="actual channel counts"):
        f.report_risk({"softmax": 0.1}, 0, 100, 64)


@pytest.mark.parametrize(
    ("degradation", "mape", "score", "level"),
    [
        (0.05, None, 0, "LOW"),
        (0.06, None, 10, "LOW"),
        (0.10, None, 10, "LOW"),
        (0.11, None, 30, "LOW"),
        (0.11, 0.06, 45, "MODERATE"),
        (0.20, 0.10, 45, "MODERATE"),
        (0.21, None, 50, "MODERATE"),
        (0.21, 0.06, 65, "HIGH"),
        (0.21, 0.11, 80, "HIGH"),
        (0.0, 0.11, 30, "LOW"),
        (None, None, 0, f.NOT_MEASURABLE),
        (None, 0.11, 30, f.NOT_MEASURABLE),
        (0.01, math.nan, 0, f.NOT_MEASURABLE),
        (0.0, math.inf, 100, "HIGH"),
        (None, math.inf, 100, "HIGH"),
    ],
)
def test_dashboard_risk(degradation: float | None, mape: float | None, score: float, level: str) -> None:
    """50 / 30 / 10 by degradation and 30 / 15 by MAPE, all strictly above their limits."""
    risk = f.dashboard_risk(degradation, mape)
    assert (risk.name, risk.score, risk.level) == ("dashboard_risk", score, level)
    assert json.loads(json.dumps(to_json(risk), allow_nan=False))["level"] == level


# ---- findings and recommendations -----------------------------------------------------------------------------------


def test_a_finding_is_json() -> None:
    """A finding carries its number, interval, n, target and evidence into JSON."""
    size = Estimate(0.12, 0.05, None, 100)
    finding = Finding(
        "HIGH", "operator softmax", "loses 12 %", Target("operator", ("softmax",)), size, "share", 0.2, "injected"
    )
    plain = json.loads(json.dumps(to_json(finding)))
    assert from_json(Finding, plain) == finding and finding.rated and finding.urgent
    assert plain["component"] == "operator softmax" and plain["size"]["low"] == 0.05 and plain["size"]["n"] == 100


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Finding("SEVERE", "x", "y", Target("model"), None, "share", 1, "none"), "unknown severity 'SEVERE'"),
        (lambda: Recommendation("MODERATE", "x", "y", "z"), "CRITICAL, HIGH, MEDIUM, LOW"),
        (lambda: f.outlier_advice("W2A2"), "W8A8, W4A16, W4A4"),
        (lambda: f.operator_advice("softmx"), "Did you mean 'softmax'"),
        (lambda: Window(5, 3, 0.1), "both inclusive"),
    ],
)
def test_mistakes_are_named(call: Any, words: str) -> None:
    """Wrong words raise an error that lists the right ones."""
    with pytest.raises(InvalidInput, match=words):
        call()


def test_recommendations_in_order() -> None:
    """Urgent ones first, in the order given among equals."""
    made = [Recommendation(p, c, "i", "a") for p, c in [("LOW", "a"), ("MEDIUM", "b"), ("HIGH", "c"), ("MEDIUM", "d")]]
    assert [r.component for r in f.by_priority(made)] == ["c", "b", "d", "a"]
    assert to_json(made[0]) == {"priority": "LOW", "component": "a", "issue": "i", "action": "a"}


# ---- advice ---------------------------------------------------------------------------------------------------------


def test_every_operator_has_advice() -> None:
    """Every operator, group and target format has advice, by its aliases too."""
    for name in (*OPERATORS, *GROUPS):
        assert f.operator_advice(name)
    assert f.operator_advice("LayerNorm") == f.operator_advice("rms_norm") == f.ADVICE["norm"]
    assert "SmoothQuant" in f.outlier_advice("w8a8") and "Outlier Suppression+" in f.outlier_advice("W8A8")
    assert "AWQ" in f.outlier_advice("W4A16")
    assert "OmniQuant" in f.outlier_advice("W4A4") and "rotation" in f.outlier_advice("W4A4")
    assert "per-channel" in f.outlier_advice()


def test_advice_does_not_harm() -> None:
    """No epsilon is prescribed, and FP16 is bound to a look at the maximum."""
    assert not any("1e-5" in text for text in f.ADVICE.values())
    assert "keep the trained value" in f.ADVICE["norm"]
    assert "65504" in f.ADVICE["critical layers"] and "BF16" in f.ADVICE["critical layers"]
    assert not any("FP16" in text for name, text in f.ADVICE.items() if name != "critical layers")


# ---- avalanche ------------------------------------------------------------------------------------------------------


def sweep(hot: dict[int, float], *, layers: int = 28, size: int = 3, step: int = 1, base: float = 0.02) -> list[Window]:
    """Windows over layers, each losing `base` plus what its hot layers cost."""
    return [
        Window(start, start + size - 1, base + sum(hot.get(layer, 0.0) for layer in range(start, start + size)))
        for start in range(0, layers - size + 1, step)
    ]


@pytest.mark.parametrize("layer", range(28))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_one_hot_layer_is_one_point(layer: int, size: int) -> None:
    """A single hot layer is found once wherever it is, edges included, and the layers in common name it."""
    (point,) = f.avalanche_points(sweep({layer: 0.16}, size=size))
    assert point.start <= layer <= point.end
    assert point.severity == "HIGH"
    assert point.degradation == pytest.approx(0.18)
    if size <= layer < 28 - size:
        assert point.common == (layer, layer)
    if 2 * size <= layer < 28 - 2 * size:
        assert len(point.neighbours) == 2
    if layer == 0:
        assert len(point.neighbours) == 1


def test_adjacent_windows_as_neighbours_would_find_nothing() -> None:
    """The rule must not compare overlapping windows: they are as hot as the window itself."""
    windows = sweep({10: 0.25})
    hottest = max(w.degradation or 0 for w in windows)
    assert sum(w.degradation == hottest for w in windows) == 3
    (point,) = f.avalanche_points(windows)
    assert (point.severity, point.neighbours) == ("CRITICAL", (0.02, 0.02))


def test_two_regions_are_two_points_in_order() -> None:
    """Hot layers far apart are two points; of overlapping hits the largest window stays."""
    points = f.avalanche_points(reversed(sweep({5: 0.20, 6: 0.05, 20: 0.15})))
    assert [(p.start, p.end, p.severity) for p in points] == [(4, 6, "CRITICAL"), (18, 20, "HIGH")]
    assert points[0].degradation == pytest.approx(0.27)


def test_limits_are_strict() -> None:
    """Exactly 15 % is no avalanche, exactly 20 % is not critical, exactly 1.5 x a neighbour does not stand out."""

    def three(left: float, middle: float, right: float) -> list[Window]:
        return [Window(0, 2, left), Window(3, 5, middle), Window(6, 8, right)]

    assert f.avalanche_points(three(0.01, 0.15, 0.01)) == []
    (point,) = f.avalanche_points(three(0.01, 0.20, 0.01))
    assert point.severity == "HIGH"
    assert f.avalanche_points(three(0.125, 0.1875, 0.01)) == []
    assert f.avalanche_points(three(0.01, 0.1875, 0.125)) == []
    assert len(f.avalanche_points(three(0.124, 0.1875, 0.124))) == 1
    assert len(f.avalanche_points(three(-0.3, 0.16, -0.1))) == 1
    assert len(f.avalanche_points(three(0.01, 0.08, 0.01), threshold=0.05)) == 1


def test_a_plateau_and_a_quiet_model_have_no_points() -> None:
    """Nothing stands out where all windows lose alike, little or much."""
    assert f.avalanche_points(sweep({})) == []
    assert f.avalanche_points(sweep({}, base=0.4)) == []
    assert f.avalanche_points([]) == []


def test_unmeasured_windows_are_passed_over() -> None:
    """A window without a number is no hit and no neighbour; the next measured one is."""
    windows = [Window(0, 2, 0.3), Window(3, 5, None), Window(6, 8, 0.31), Window(9, 11, math.nan)]
    assert f.avalanche_points(windows) == []
    assert f.avalanche_points([Window(0, 2, None), Window(3, 5, math.nan)]) == []


def test_a_shallow_model_has_no_neighbours() -> None:
    """Where no window fits beside the hot one, nothing stands out from anything: its band says what it lost."""
    assert f.avalanche_points([Window(0, 2, 0.3), Window(1, 3, 0.25)]) == []
    (point,) = f.avalanche_points([Window(0, 2, 0.3), Window(1, 3, 0.25), Window(4, 6, 0.0)])
    assert json.loads(json.dumps(to_json(point)))["common"] == [1, 2] and point.neighbours == (0.0,)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_steps_do_not_hide_a_hot_layer(step: int) -> None:
    """Whatever the stride, a hot layer covered by windows is found once."""
    assert len(f.avalanche_points(sweep({12: 0.2}, layers=27, step=step))) == 1


def test_no_torch_and_no_numpy() -> None:
    """Findings are plain Python."""
    code = "import sys, noisescope.findings; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
