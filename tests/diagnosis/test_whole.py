"""A diagnosis of made-up results finds what was planted in them, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from noisescope.diagnosis import threshold, whole
from noisescope.diagnosis.frame import Frame, Settings
from noisescope.diagnosis.layers import cells
from noisescope.diagnosis.robustness import Robustness, checked_levels
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.probe.noise import Gaussian
from noisescope.sites import Site
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


def frame(**settings: Any) -> Frame:
    return Frame(
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
    """Layer 5 loses 25 % of the accuracy at any noise; KL adds up over layers."""
    return (0.25 if 5 in places(injection) else 0.0), 1e-4 * len(places(injection)) + (
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
                "nonfinite": 0 * DICE[at],
            }
        return Result(
            tuple(range(part.start, part.stop)), {k: tuple(map(float, v)) for k, v in values.items()}, {"injections": 7}
        )
    if trial.measure == "screen":
        found = list(sites())
        facts = [
            {
                "operator": s.operator,
                "place": s.place,
                "module": s.module,
                "component": s.component,
                "occurrence": 0,
                "channels": 4,
            }
            for s in found
        ]
        sums = np.array(
            [[truth(Injection(Gaussian(0.05), places={s.place}, operators={s.operator}))[1]] * count for s in found]
        )
        channels = np.repeat(sums.sum(1) / 4, 4).astype(np.float32)
        return Result(
            (), {}, {"sites": facts}, {"sums": sums * 800, "tokens": np.ones(count), "channels": channels * 800}
        )
    if trial.measure == "capture":
        found = [s for s in sites() if s.operator == "linear"]
        facts = [
            {
                "operator": s.operator,
                "place": s.place,
                "module": s.module,
                "component": s.component,
                "occurrence": 0,
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
        module = {"module": "layers.0.mlp.up", "place": 0, "parameters": 64, "inputs": 8}
        module["effective_bits"] = {"int8": 8.5, "int4": 4.5}
        predicted = np.array([[[1e-4, 3e-4], [1e-2, 3e-2]]])  # [modules, formats, samples]
        return Result((), {}, {"modules": [module], "formats": [["int8", 8], ["int4", 4]]}, {"predicted": predicted})
    norms = {str(b): 1.0 if trial.injection is None else 1.2 for b in range(BLOCKS)}
    return Result((), {}, {"norms": norms})


def diagnosed(
    truth: Truth, *, clean: float = 0.95, spoil: Any = None, **settings: Any
) -> tuple[dict[str, Any], dict[str, Result], Frame]:
    here = frame(**settings)
    results: dict[str, Result] = {}
    waves = 0
    while wanted := missing(whole.propose(here, results), results):
        for trial in wanted:
            results[trial.id] = (spoil and spoil(trial)) or made_up(trial, truth, clean)
        waves += 1
        assert waves < 30
    report = whole.conclude(here, results)
    json.dumps(report, allow_nan=False)
    return report, results, here


def test_a_hot_layer_is_an_avalanche_point() -> None:
    """All windows that hold it lose alike; against neighbours that share no layer it stands out, once."""
    report, _, _ = diagnosed(hot_layer_five)
    (point,) = report["executive_summary"]["avalanche_points"]
    assert point["start"] <= 5 <= point["end"] and point["severity"] == "CRITICAL" and point["common"] == [5, 5]
    assert point["interval"]["low"] < 0.25 < point["interval"]["high"]
    assert report["findings"][0]["severity"] == "CRITICAL"
    assert any("avalanche point" in f["statement"] for f in report["findings"])
    assert any(r["component"].startswith("Layers: L") for r in report["recommendations"])


def test_nothing_planted_nothing_found() -> None:
    """No loss: bands are low, no avalanche, no compounding; and the report says what it could have seen."""
    report, _, _ = diagnosed(harmless)
    assert not report["executive_summary"]["avalanche_points"] and not report["layer_analysis"]["compounding"]
    assert {row["band"] for row in report["layer_analysis"]["windows"]} == {"ROBUST"}
    assert report["metrics"]["primary"]["critical_threshold"]["label"] == "> 0.20"
    assert report["metrics"]["primary"]["noise_tolerance_index"]["value"] is None
    assert report["metrics"]["primary"]["noise_tolerance_band"] == "EXCELLENT"
    assert any("could have been missed" in limit for limit in report["could_not_see"])
    found = [f for f in report["findings"] if f["severity"] in ("CRITICAL",)]
    assert not found


def test_errors_that_compound_have_an_index_above_one() -> None:
    """Layers 3 and 4 together diverge ten times as far as apart: the window's index says so, the others are 1."""

    def compounding(injection: Injection) -> tuple[float, float]:
        base = 1e-3 * len(places(injection))
        return 0.0, base * (10 if {3, 4} <= places(injection) and len(places(injection)) < BLOCKS else 1)

    report, _, _ = diagnosed(compounding, effort="full")
    by_range = {row["layer_range"]: row for row in report["layer_analysis"]["windows"]}
    assert by_range["L2-4"]["interaction_index"]["value"] == pytest.approx(10, rel=1e-3)
    assert by_range["L7-9"]["interaction_index"]["value"] == pytest.approx(1, rel=1e-3)
    assert report["layer_analysis"]["compounding"] == ["L2-4", "L3-5"]


def test_the_screen_alone_has_no_bands() -> None:
    """Predictions in nats and rank; risk is not measurable, never LOW; nothing was injected."""
    report, results, _ = diagnosed(hot_layer_five, effort="screen")
    assert {row["evidence"] for row in report["operator_analysis"].values()} == {"predicted", "absent"}
    assert all("band" not in row for row in report["layer_analysis"]["windows"])
    assert report["executive_summary"]["overall_risk_level"].startswith("not measurable")
    assert "--effort standard" in report["executive_summary"]["next_step"]
    ranked = sorted(report["layer_analysis"]["layers"], key=lambda row: -row["predicted_kl"]["value"])
    assert ranked[0]["layer"] == 5 and len(results) == 3 + 3 + 1  # clean, screen, capture


def test_standard_confirms_what_matters_and_full_injects_all() -> None:
    """The cells of the hot layer are among those injected; a full diagnosis has no prediction without injection."""
    standard, few, here = diagnosed(hot_layer_five)
    injected = [row for row in standard["layer_analysis"]["map"] if row["evidence"] == "injected"]
    assert {row["layer"] for row in injected if row["kl"]["value"] > 1e-3} == {5} and len(injected) == 12
    full, many, _ = diagnosed(hot_layer_five, effort="full")
    assert {row["evidence"] for row in full["layer_analysis"]["map"]} == {"injected"}
    assert len(full["layer_analysis"]["map"]) == len(cells(here)) and len(few) < len(many) / 2
    assert set(full["metrics"]["critical_thresholds"]) >= {"model", "operator softmax", "layer 5"}


def test_prediction_and_injection_that_part_are_flagged() -> None:
    """A site that costs ten times what the screen predicted is not linear there."""

    def spoil(trial: Trial) -> Result | None:
        if trial.measure == "score" and trial.injection is not None and trial.injection.places == {"lm_head"}:
            return made_up(trial, lambda i: (0.0, 1e-3))
        return None

    report, _, _ = diagnosed(harmless, spoil=spoil)
    assert report["layer_analysis"]["places"]["lm_head"]["parted"]
    assert not any(row["parted"] for row in report["layer_analysis"]["layers"] if "parted" in row)
    assert any("not linear here" in f["statement"] and f["component"] == "lm_head" for f in report["findings"])


def test_at_chance_nothing_is_called_robust() -> None:
    """A model that knows nothing can lose nothing: not measurable, and the next step says what to do."""
    report, _, _ = diagnosed(harmless, clean=0.02)
    bands = {row.get("band") for row in report["operator_analysis"].values()} - {None}
    assert bands == {"not measurable"} and not report["metrics"]["baseline"]["measurable"]
    assert report["metrics"]["primary"]["critical_threshold"]["label"] == "not measurable"
    assert "chance" in report["executive_summary"]["next_step"]
    assert report["executive_summary"]["overall_risk_level"].startswith("not measurable")


def test_a_failed_trial_is_a_row_that_says_so() -> None:
    """Everything else is still reported."""

    def spoil(trial: Trial) -> Result | None:
        hit = trial.injection is not None and trial.measure == "score" and trial.injection.operators == {"softmax"}
        return Result(error="OutOfLuck: it rained") if hit else None

    report, _, _ = diagnosed(harmless, spoil=spoil)
    assert report["operator_analysis"]["softmax"] == {
        **report["operator_analysis"]["softmax"],
        "evidence": "failed",
        "error": "OutOfLuck: it rained",
    }
    assert report["operator_analysis"]["norm"]["evidence"] == "injected"
    assert any("it rained" in f["statement"] for f in report["findings"])

    def no_screen(trial: Trial) -> Result | None:
        return (
            Result(error="Unsupported: no gradients") if trial.measure in ("screen", "capture", "curvature") else None
        )

    report, _, _ = diagnosed(hot_layer_five, spoil=no_screen)
    assert "the screen failed" in report["could_not_see"][0] and report["channel_analysis"]["evidence"] == "failed"
    assert len(report["executive_summary"]["avalanche_points"]) == 1


def test_absent_operators_and_levels_left_out() -> None:
    """bmm and gelu are rows "absent"; a level not asked for is null and costs nothing."""
    report, _, _ = diagnosed(harmless, levels=("operator",))
    assert report["operator_analysis"]["gelu"] == {"evidence": "absent"} and report["layer_analysis"] is None
    assert report["channel_analysis"] is None and report["correlations"] == {}
    assert report["executive_summary"]["total_outlier_channels"] is None


def test_one_massive_channel_is_found_and_correlated() -> None:
    """Advice goes by the largest ratio, not by the share of channels."""
    report, _, _ = diagnosed(harmless)
    first = report["channel_analysis"]["per_layer"]["layers.0.mlp.up"]
    assert first["outlier_indices"] == [3] and first["max_ratio"] == 60.0 and first["band"] == "CRITICAL"
    assert report["channel_analysis"]["summary"]["total_outlier_channels"] == 1
    assert any(
        r["component"] == "Channels: layers.0.mlp.up" and r["priority"] == "HIGH" for r in report["recommendations"]
    )
    assert set(report["correlations"]) == {
        "hessian_sensitivity",
        "outliers_sensitivity",
        "sparsity_degradation",
        "outliers_windows",
    }


@pytest.mark.parametrize("truth", [0.013, 0.0999, 0.19])
def test_the_critical_threshold_is_bisected(truth: float) -> None:
    """A tenth is lost from `truth` on: found to a thousandth in nine scales, inside its interval."""

    def lost(injection: Injection) -> tuple[float, float]:
        return (0.3 if injection.perturbation.scale >= truth else 0.0), 1e-3  # type: ignore[attr-defined]

    here = frame()
    results: dict[str, Result] = {trial.id: made_up(trial, lost) for trial in here.ask(None)}
    waves = 0
    while wanted := missing(threshold.propose(here, results), results):
        results |= {trial.id: made_up(trial, lost) for trial in wanted}
        waves += 1
    row = threshold.conclude(here, results)
    assert row["value"] == pytest.approx(truth, abs=0.001) and waves <= 9
    assert row["low"] <= row["value"] <= row["high"] + 0.001 and len(row["tried"]) == waves


def test_robustness_has_retention_at_each_level() -> None:
    """Levels in order, the clean one without retention; a level of 0 alone is refused."""
    pair, here = Robustness(checked_levels([0.1, 0, 0.05, 0.05])), frame()
    truth: Truth = lambda injection: (4 * injection.perturbation.scale, 1e-3)  # type: ignore[attr-defined]  # noqa: E731
    results = {trial.id: made_up(trial, truth) for trial in pair.propose(here, {})}
    assert not missing(pair.propose(here, results), results)
    rows = pair.conclude(here, results)["robustness"]["levels"]
    assert [row["noise_level"] for row in rows] == [0.0, 0.05, 0.1]
    assert rows[0]["retention"] is None and rows[1]["retention"]["value"] == pytest.approx(0.8, abs=0.05)
    assert rows[2]["retention"]["low"] < 0.6 < rows[2]["retention"]["high"] and rows[2]["p_corrected"] >= rows[2]["p"]
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
            frame(**wrong)
    with pytest.raises(InvalidInput, match="injects nothing"):
        Settings(Gaussian(0.0))


def test_a_shallow_model_has_one_window() -> None:
    """A window wider than the model is the model."""
    assert frame(window=99).windows == ((0, BLOCKS - 1),)
    assert frame(window=3, step=3).windows == ((0, 2), (3, 5), (6, 8), (9, 11))


def test_format_scores_are_means_of_the_samples_with_their_error() -> None:
    """Each module and format has its KL; a screen has none; a failure is told and hides nothing else."""
    report, _, _ = diagnosed(harmless)
    (row,) = report["format_scores"]["modules"]
    assert row["inputs"] == 8
    assert row["formats"]["int4"] == {
        "bits": 4, "effective_bits": 4.5, "predicted_kl": pytest.approx(2e-2), "standard_error": pytest.approx(1e-2)
    }  # fmt: skip
    assert report["format_scores"]["uniform"]["int8"]["predicted_kl"] == pytest.approx(2e-4)
    assert diagnosed(harmless, effort="screen")[0]["format_scores"] is None
    broken, _, _ = diagnosed(harmless, spoil=lambda trial: Result(error="no") if trial.measure == "formats" else None)
    assert broken["format_scores"]["error"] == "no" and broken["operator_analysis"] == report["operator_analysis"]
