"""A diagnosis of made-up results finds what was planted in them, and nothing else."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from noisescope.diagnosis import all_levels, robustness_curve
from noisescope.diagnosis.context import Settings, StudyContext
from noisescope.diagnosis.layers import cells
from noisescope.diagnosis.metrics_dashboard import correlations
from noisescope.diagnosis.robustness_curve import RobustnessQuestion, checked_levels
from noisescope.diagnosis.rows import Effect, LayerAnalysis
from noisescope.diagnosis.section_types import Conclusions, FormatScore, HessianTraces, Trace
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.jsonform import from_json, to_json
from noisescope.options.fields import LEVEL_ONE
from noisescope.probe.noise import Gaussian
from noisescope.sites import OPERATORS, Site
from noisescope.trials import Conditions, Result, Slice, Trial, missing, slices

BLOCKS, SAMPLES = 12, 60
DICE = np.random.default_rng(0).random(SAMPLES)  # one draw a sample: noise is common to all trials


def sites() -> tuple[Site, ...]:
    found = [Site("embedding", "embed", "embed"), Site("norm", "final_norm", "norm"), Site("linear", "lm_head", "head")]
    for block in range(BLOCKS):
        for operator, module, part in (
            ("linear", "mlp.up", "mlp"),
            ("matmul", "attn", "attention"),
            ("softmax", "attn", "attention"),
            ("silu", "mlp.act", "mlp"),
            ("norm", "norm", ""),
        ):
            found.append(Site(operator, block, f"layers.{block}.{module}", part))
    return tuple(found)


def context(**settings: Any) -> StudyContext:
    return StudyContext(
        Settings(Gaussian(0.05), **settings),
        Conditions("m", "float32", "cpu", "sdpa", 1),
        sites(),
        BLOCKS,
        slices("data", SAMPLES, 25),
        Slice("calibration", 0, 30),
        Slice("data", 0, 8),
    )


Truth = Callable[[Injection], tuple[float, float]]  # injection -> (loss of accuracy, KL)


def places(injection: Injection) -> set[Any]:
    return {site.place for site in sites() if injection.selects(site)}


def harmless(injection: Injection) -> tuple[float, float]:
    return 0.0, 1e-4 * len(places(injection))


def hot_layer_five(injection: Injection) -> tuple[float, float]:
    """Layer 5 loses half of the accuracy at any noise; KL adds up over layers."""
    return (0.5 if 5 in places(injection) else 0.0), 1e-4 * len(places(injection)) + (
        1e-2 if 5 in places(injection) else 0
    )


def made_up(trial: Trial, truth: Truth, clean: float = 0.95) -> Result:
    part = trial.slice
    count = part.stop - part.start
    at = slice(part.start, part.stop)
    if trial.measure == "score":
        right = DICE[:SAMPLES][at] < clean
        if trial.injection is None:
            values = {
                "accuracy": right.astype(float),
                "agreement": np.ones(count),
                "nll": DICE[at],
                "nonfinite": 0 * DICE[at],
            }
        else:
            lost, kl = truth(trial.injection)
            spread = 1 + 0.1 * np.sin(np.arange(SAMPLES) + trial.injection.seed)[at]
            values = {
                "accuracy": (DICE[at] < clean * (1 - lost)).astype(float),
                "kl": kl * spread,
                "agreement": 1 - lost + 0 * DICE[at],
                "snr_db": 30.1 + 8 * (DICE[at] - DICE.mean()),
                "nonfinite": 0 * DICE[at],
            }
        return Result(
            tuple(range(part.start, part.stop)), {k: tuple(map(float, v)) for k, v in values.items()}, {"injections": 7}
        )
    if trial.measure == "screen":
        found = list(sites())
        facts = [
            {
                **s.facts(),
                "channels": 4,
            }
            for s in found
        ]
        sums = np.array(
            [[truth(Injection(Gaussian(0.05), places={s.place}, operators={s.operator}))[1]] * count for s in found]
        )
        channels = np.repeat(sums.sum(1) / 4, 4).astype(np.float32)
        return Result(
            (),
            {},
            {"sites": facts, "lost": []},
            {"sums": sums * 800, "tokens": np.ones(count), "channels": channels * 800},
        )
    if trial.measure == "capture":
        found = [s for s in sites() if s.operator == "linear"]
        facts = [
            {
                **s.facts(),
                "channels": 100,
                "count": 99,
                "sparsity": 0.0,
                "relative_sparsity": 0.1,
            }
            for s in found
        ]
        largest = np.ones(100 * len(found))
        largest[103] = 60.0  # one massive channel in the first module of the blocks
        columns = {
            "max": largest,
            "mean": largest,
            "mean_abs": largest,
            "std": largest,
            "q50": 0 * largest + 1,
            "q99": 0 * largest + 2,
        }
        return Result((), {}, {"sites": facts}, columns)
    if trial.measure == "curvature":
        traces = {
            str(b): {"trace": float(b), "low": 0.0, "high": 20.0, "per_parameter": 0.1, "probes": 8}
            for b in range(BLOCKS)
        }
        return Result((), {}, {"traces": traces})
    if trial.measure == "formats":
        module = {"module": "layers.0.mlp.up", "place": 0, "parameters": 64, "inputs": 8, "kind": "Linear"}
        module["effective_bits"] = {"int8": 8.5, "int4": 4.5}
        predicted = np.array([[[1e-4, 3e-4], [1e-2, 3e-2]]])  # [modules, formats, samples]
        facts = {"modules": [module], "formats": [["int8", 8], ["int4", 4]], "block_parameters": 64}
        return Result((), {}, facts, {"predicted": predicted})
    norms = {str(b): 1.0 if trial.injection is None else 1.2 for b in range(BLOCKS)}
    return Result((), {}, {"norms": norms})


@functools.cache
def diagnosed(
    truth: Truth, *, clean: float = 0.95, spoil: Any = None, **settings: Any
) -> tuple[Conclusions, dict[str, Result], StudyContext]:
    here = context(**settings)
    results: dict[str, Result] = {}
    waves = 0
    while wanted := missing(all_levels.propose(here, results), results):
        for trial in wanted:
            results[trial.id] = (spoil and spoil(trial)) or made_up(trial, truth, clean)
        waves += 1
        assert waves < 30
    found = all_levels.conclude(here, results)
    assert from_json(Conclusions, json.loads(json.dumps(to_json(found), allow_nan=False))) == found
    return found, results, here


def layers_of(found: Conclusions) -> LayerAnalysis:
    assert found.layer_analysis is not None
    return found.layer_analysis


def operators_of(found: Conclusions) -> dict[str, Effect]:
    assert found.operator_analysis is not None
    return dict(found.operator_analysis)


def test_a_hot_layer_is_an_avalanche_point() -> None:
    """All windows that hold it lose alike; against neighbours that share no layer it stands out, once."""
    found, _, _ = diagnosed(hot_layer_five)
    (point,) = found.executive_summary.avalanche_points
    assert point.start <= 5 <= point.end and point.decided and point.common == (5, 5)
    assert point.degradation.low is not None and point.degradation.high is not None
    assert 0.2 < point.degradation.low < 0.5 < point.degradation.high and point.severity == "CRITICAL"


def test_the_hot_layer_leads_the_list_and_everything_made_from_it() -> None:
    """Windows, the layer and operators collapse into cells of layer 5; recommendations and next step follow."""
    found, _, _ = diagnosed(hot_layer_five)
    first = found.findings[0]
    assert first.target.layers == (5,) and first.urgent and any("avalanche point" in note for note in first.notes)
    assert {(finding.target.kind, finding.target.layers) for finding in found.findings if finding.rated} == {
        ("cell", (5,))
    }
    assert found.recommendations[0].component == first.component
    assert first.component in found.executive_summary.next_step
    assert found.executive_summary.overall_risk_level == "HIGH"


def test_metrics_have_the_bands_of_their_intervals() -> None:
    """An SNR of 30.1 is GOOD by its value; its interval reaches below 30. What has no interval has a point band."""
    secondary = diagnosed(harmless)[0].metrics.secondary
    assert secondary.snr_db is not None and secondary.snr_db.value == pytest.approx(30.1)
    assert (secondary.snr_band, secondary.snr_band_upper) == ("FAIR", "GOOD")
    assert secondary.gradient_ratio is not None and secondary.gradient_ratio.point_band == "MODERATE"
    assert secondary.activation_sparsity is not None and secondary.activation_sparsity.point_band == "DENSE"


def test_few_samples_leave_a_point_borderline() -> None:
    """The same loss by its point value, but the interval of so few samples holds the limit."""
    few = replace(context(), test=slices("data", 12, 12))
    results: dict[str, Result] = {}
    while wanted := missing(all_levels.propose(few, results), results):
        results |= {trial.id: made_up(trial, hot_layer_five) for trial in wanted}
    found = all_levels.conclude(few, results)
    section = layers_of(found)
    assert len(section.point_rule_avalanches) == 1 and not found.executive_summary.avalanche_points
    assert [point.state for point in section.avalanche_points] == ["borderline"]


def test_nothing_planted_nothing_found() -> None:
    """No loss: no rated finding, no avalanche, no compounding; and the report says what it could have missed."""
    found, _, _ = diagnosed(harmless)
    assert not found.executive_summary.avalanche_points and not layers_of(found).compounding
    assert {row.band for row in layers_of(found).windows} == {"ROBUST"}
    assert not any(finding.rated for finding in found.findings)
    primary = found.metrics.primary
    assert primary.critical_threshold is not None and primary.critical_threshold.label == "> 0.20"
    assert primary.noise_tolerance_index is not None and primary.noise_tolerance_index.value is None
    assert primary.noise_tolerance_band == "EXCELLENT"
    assert any("could have been missed" in limit for limit in found.could_not_see)


def test_errors_that_compound_have_an_index_above_one() -> None:
    """Layers 3 and 4 together diverge ten times as far as apart: the window's index says so, the others are 1."""

    def compounding(injection: Injection) -> tuple[float, float]:
        base = 1e-3 * len(places(injection))
        return 0.0, base * (10 if {3, 4} <= places(injection) and len(places(injection)) < BLOCKS else 1)

    found, _, _ = diagnosed(compounding, effort="full")
    indices = {row.layer_range: row.interaction_index for row in layers_of(found).windows}
    hot, plain = indices["L2-4"], indices["L7-9"]
    assert hot is not None and hot.index.value == pytest.approx(10, rel=1e-3)
    assert plain is not None and plain.index.value == pytest.approx(1, rel=1e-3)
    assert layers_of(found).compounding == ("L2-4", "L3-5")


def test_the_screen_alone_has_no_bands() -> None:
    """Predictions in nats and rank; risk is not measurable, never LOW; nothing was injected."""
    found, results, _ = diagnosed(hot_layer_five, effort="screen")
    assert {row.evidence for row in operators_of(found).values()} == {"predicted", "absent"}
    assert {row.band for row in layers_of(found).windows} == {"not measurable"}
    assert found.executive_summary.overall_risk_level == "not measurable"
    assert "--effort standard" in found.executive_summary.next_step
    assert found.findings[0].target.layers == (5,) and found.findings[0].evidence == "predicted"
    assert max(layers_of(found).layers, key=lambda row: row.nats).layer == 5
    assert len(results) == 3 + 3 + 1 + 1  # clean, screen, capture, formats


def test_standard_confirms_what_matters_and_full_injects_all() -> None:
    """The cells of the hot layer are among those injected; a full diagnosis has no prediction without injection."""
    standard, few, here = diagnosed(hot_layer_five)
    injected = [row for row in layers_of(standard).map if row.injected]
    assert {row.layer for row in injected if row.nats > 1e-3} == {5} and len(injected) == 12
    full, many, _ = diagnosed(hot_layer_five, effort="full")
    assert {row.evidence for row in layers_of(full).map} == {"injected"}
    assert len(layers_of(full).map) == len(cells(here)) and len(few) < len(many) / 2
    assert set(full.metrics.critical_thresholds) >= {"model", "operator softmax", "layer 5"}


def test_injection_that_differs_from_the_prediction_is_flagged() -> None:
    """A site that costs ten times what the screen predicted is not linear there."""

    def spoil(trial: Trial) -> Result | None:
        if trial.measure == "score" and trial.injection is not None and trial.injection.places == {"lm_head"}:
            return made_up(trial, lambda i: (0.0, 1e-3))
        return None

    found, _, _ = diagnosed(harmless, spoil=spoil)
    assert layers_of(found).places["lm_head"].nonlinear
    assert not any(row.nonlinear for row in layers_of(found).layers)
    head = next(finding for finding in found.findings if finding.component == "lm_head")
    assert any("not linear here" in note for note in head.notes)


def test_at_chance_nothing_is_called_robust() -> None:
    """A model that knows nothing can lose nothing: not measurable, and the next step says what to do."""
    found, _, _ = diagnosed(harmless, clean=0.0)
    assert {row.band for row in operators_of(found).values()} == {"not measurable"}
    assert found.metrics.baseline is not None and not found.metrics.baseline.measurable
    threshold_found = found.metrics.primary.critical_threshold
    assert threshold_found is not None and threshold_found.label == "not measurable"
    assert "chance" in found.executive_summary.next_step
    assert found.executive_summary.overall_risk_level == "not measurable"


def test_a_failed_trial_is_a_row_that_says_so() -> None:
    """Everything else is still reported."""

    def spoil(trial: Trial) -> Result | None:
        hit = trial.injection is not None and trial.measure == "score" and trial.injection.operators == {"softmax"}
        return Result(error="OutOfLuck: it rained") if hit else None

    found, _, _ = diagnosed(harmless, spoil=spoil)
    failed = operators_of(found)["softmax"]
    assert (failed.evidence, failed.error) == ("failed", "OutOfLuck: it rained")
    assert operators_of(found)["norm"].injected
    assert any("it rained" in finding.statement for finding in found.findings)

    def no_screen(trial: Trial) -> Result | None:
        return (
            Result(error="Unsupported: no gradients") if trial.measure in ("screen", "capture", "curvature") else None
        )

    found, _, _ = diagnosed(hot_layer_five, spoil=no_screen)
    assert found.channel_analysis is not None and found.channel_analysis.evidence == "failed"
    assert "the screen failed" in found.could_not_see[0]
    assert len(found.executive_summary.avalanche_points) == 1


@pytest.mark.parametrize("effort", ["screen", "standard"])
def test_where_every_trial_fails_the_report_says_why_and_rates_nothing(effort: str) -> None:
    """No cost, no "nothing stands out", no plan of harmless places: the error is the next step."""

    def spoil(trial: Trial) -> Result | None:
        return Result(facts={"error_type": "RuntimeError"}, error="RuntimeError: boom")

    found, _, _ = diagnosed(harmless, spoil=spoil, effort=effort)
    summary = found.executive_summary
    assert summary.overall_risk_level == "not measurable" and "costs" not in summary.next_step
    assert summary.next_step.startswith("The clean model could not be measured")
    assert not any(finding.rated for finding in found.findings)
    assert "boom" in summary.next_step


def test_the_reason_for_no_rating_is_the_one_that_holds() -> None:
    """At chance more samples do not help, and a screen has measured no loss: neither says "too few samples"."""
    at_chance, _, _ = diagnosed(harmless, clean=0.0)
    assert "chance" in at_chance.executive_summary.risk_meaning
    assert at_chance.executive_summary.in_plain_words.success == ""
    screened, _, _ = diagnosed(harmless, effort="screen")
    assert "without injecting noise" in screened.executive_summary.risk_meaning
    for found in (at_chance, screened):
        assert not any("could have been missed" in limit or "too few" in limit for limit in found.could_not_see)


def test_one_number_has_one_interval() -> None:
    """The loss of the whole model is the operators' row of all products, to the last digit."""
    found, _, _ = diagnosed(hot_layer_five)
    assert found.metrics.primary.relative_degradation == operators_of(found)["gemm"].degradation


def test_an_interval_stays_within_what_a_share_can_be() -> None:
    """A score can't rise above 1: with 95 % right, no loss is below 1 - 1 / 0.95."""
    found, _, _ = diagnosed(harmless)
    for row in (*operators_of(found).values(), *layers_of(found).windows):
        if row.degradation is not None and row.degradation.low is not None:
            assert row.baseline_acc is not None and row.degradation.low >= 1 - 1 / row.baseline_acc - 1e-12


def test_an_operator_that_was_never_computed_is_absent() -> None:
    """Where the model may or may not have it and noise fell on nothing; another failure stays a failure."""

    def spoil(kind: str) -> Callable[[Trial], Result | None]:
        def never(trial: Trial) -> Result | None:
            hit = trial.injection is not None and trial.measure == "score" and trial.injection.operators == {"gelu"}
            return Result(facts={"error_type": kind}, error=f"{kind}: nothing") if hit else None

        return never

    for kind, evidence in (("NothingInjected", "absent"), ("RuntimeError", "failed")):
        here = replace(context(levels=("operator",)), uncertain_operators=frozenset({"gelu"}))
        results: dict[str, Result] = {}
        while wanted := missing(all_levels.propose(here, results), results):
            results |= {trial.id: spoil(kind)(trial) or made_up(trial, harmless) for trial in wanted}
        assert operators_of(all_levels.conclude(here, results))["gelu"].evidence == evidence


def test_absent_operators_and_levels_left_out() -> None:
    """bmm and gelu are rows "absent"; a level not asked for is null and costs nothing."""
    found, _, _ = diagnosed(harmless, levels=("operator",))
    assert operators_of(found)["gelu"] == Effect(evidence="absent") and found.layer_analysis is None
    assert found.channel_analysis is None and not found.correlations
    assert found.executive_summary.total_outlier_channels is None


def test_one_massive_channel_is_found_and_correlated() -> None:
    """Advice goes by the largest ratio, not by the share of channels."""
    found, _, _ = diagnosed(harmless)
    section = found.channel_analysis
    assert section is not None and section.summary is not None
    first = section.per_layer["layers.0.mlp.up"]
    assert first.outlier_indices == (3,) and first.max_ratio == 60.0 and first.band == "CRITICAL"
    assert section.summary.total_outlier_channels == 1
    assert any(one.component == "layers.0.mlp.up" and "SmoothQuant" in one.action for one in found.recommendations)
    assert set(found.correlations) == {
        "hessian_sensitivity",
        "outliers_sensitivity",
        "sparsity_degradation",
        "outliers_windows",
    }


def graded(injection: Injection) -> tuple[float, float]:
    """KL grows from layer to layer."""
    return 0.0, 1e-4 * sum(1 + place for place in places(injection) if isinstance(place, int))


@functools.cache
def measured_layers(truth: Truth) -> tuple[StudyContext, LayerAnalysis]:
    found, _, here = diagnosed(truth, effort="full", levels=("layer",))
    return here, layers_of(found)


@pytest.mark.parametrize(
    ("truth", "traces", "held", "carried"),
    [
        (graded, range(1, BLOCKS + 1), "yes", False),
        (graded, range(BLOCKS, 0, -1), "no", False),
        (graded, [1, 9, 3, 11, 4, 2, 10, 6, 12, 5, 8, 7], "undecided", False),
        (hot_layer_five, [100 if layer == 5 else layer % 3 for layer in range(BLOCKS)], "undecided", True),
    ],
    ids=["rises with it", "falls with it", "hardly related", "one layer alone"],
)
def test_a_correlation_holds_only_where_its_interval_clears_the_limit(
    truth: Truth, traces: Sequence[float], held: str, carried: bool
) -> None:
    """The interval decides against r = 0.7, not the point value: one hot layer makes r = 1 and proves nothing."""
    wiggle = np.random.default_rng(0).normal(0, 0.1, BLOCKS)
    rows = {str(layer): Trace(trace + wiggle[layer], None, None, 0.1, 8) for layer, trace in enumerate(traces)}
    here, layers = measured_layers(truth)
    row = correlations(here, layers, HessianTraces("", rows), None)["hessian_sensitivity"]
    assert (row.held, row.carried_by_one, row.expected) == (held, carried, "r above 0.7")
    assert row.correlation.n == BLOCKS and row.correlation.value is not None
    assert (row.correlation.value > 0.7) == (held == "yes" or carried)


@pytest.mark.parametrize("truth", [0.013, 0.0999, 0.19])
def test_the_critical_threshold_is_bisected(truth: float) -> None:
    """A tenth is lost from `truth` on: found to a thousandth in nine scales, inside its interval."""

    def lost(injection: Injection) -> tuple[float, float]:
        return (0.3 if injection.perturbation.scale >= truth else 0.0), 1e-3  # type: ignore[attr-defined]

    here = context()
    results: dict[str, Result] = {trial.id: made_up(trial, lost) for trial in here.ask(None)}
    waves = 0
    while wanted := missing(robustness_curve.propose(here, results), results):
        results |= {trial.id: made_up(trial, lost) for trial in wanted}
        waves += 1
    row = robustness_curve.conclude(here, results)
    assert row.value == pytest.approx(truth, abs=0.001) and waves <= 9
    assert row.value is not None and row.low is not None and row.high is not None
    assert row.low <= row.value <= row.high + 0.001 and len(row.tried) == waves


def test_robustness_has_retention_at_each_level() -> None:
    """Levels in order, the clean one without retention; a level of 0 alone is refused."""
    pair, here = RobustnessQuestion(checked_levels([0.1, 0, 0.05, 0.05])), context()
    truth: Truth = lambda injection: (4 * injection.perturbation.scale, 1e-3)  # type: ignore[attr-defined]  # noqa: E731
    results = {trial.id: made_up(trial, truth) for trial in pair.propose(here, {})}
    assert not missing(pair.propose(here, results), results)
    rows = pair.conclude(here, results).robustness.levels
    assert [row.noise_level for row in rows] == [0.0, 0.05, 0.1]
    kept = [row.retention for row in rows]
    assert kept[0] is None and kept[1] is not None and kept[1].value == pytest.approx(0.8, abs=0.05)
    assert kept[2] is not None and kept[2].low is not None and kept[2].high is not None
    assert kept[2].low < 0.6 < kept[2].high
    assert rows[2].p_corrected is not None and rows[2].p is not None and rows[2].p_corrected >= rows[2].p
    with pytest.raises(InvalidInput, match="above 0"):
        checked_levels([0])


def test_settings_are_checked() -> None:
    """A word that isn't known, an empty choice, a window of nothing: one clear error each."""
    for wrong, words in (
        ({"effort": "lots"}, "lots"),
        ({"levels": ("operators",)}, "operators"),
        ({"levels": ()}, "no level"),
        ({"window": 0}, "at least 1"),
        ({"seeds": ()}, "one seed"),
        ({"operators": ("sofmax",)}, "softmax"),
    ):
        with pytest.raises(InvalidInput, match=words):
            context(**wrong)
    with pytest.raises(InvalidInput, match="injects nothing"):
        Settings(Gaussian(0.0))


def test_level_one_names_operators() -> None:
    """The options' list is written without importing the sites."""
    assert set(LEVEL_ONE) <= set(OPERATORS)


def test_a_shallow_model_has_one_window() -> None:
    """A window wider than the model is the model."""
    assert context(window=99).windows == ((0, BLOCKS - 1),)
    assert context(window=3, step=3).windows == ((0, 2), (3, 5), (6, 8), (9, 11))


def test_format_scores_are_means_of_the_samples_with_their_error() -> None:
    """Each module and format has its KL, in a screen too; a failure is reported and hides nothing else."""
    found, _, _ = diagnosed(harmless)
    assert found.format_scores is not None
    (row,) = found.format_scores.modules
    assert row.inputs == 8
    assert row.formats["int4"] == FormatScore(4, 4.5, pytest.approx(2e-2), pytest.approx(1e-2))
    assert found.format_scores.uniform["int8"].predicted_kl == pytest.approx(2e-4)
    assert diagnosed(harmless, effort="screen")[0].format_scores == found.format_scores
    assert diagnosed(harmless, levels=("operator",))[0].format_scores is None
    broken, _, _ = diagnosed(harmless, spoil=lambda trial: Result(error="no") if trial.measure == "formats" else None)
    assert broken.format_scores is not None and broken.format_scores.error == "no"
    assert broken.operator_analysis == found.operator_analysis
