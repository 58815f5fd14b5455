"""One ranked list: what leads, what collapses into what, and how a label is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnosis.builders import lost, predicted, sections

from noisescope.diagnosis.ranked_findings import counted_once, ranked_findings, whole_model
from noisescope.diagnosis.section_types import ChannelAnalysis, ChannelRow, OutlierRules, Sections
from noisescope.diagnosis.summary import overall_risk, recommendations
from noisescope.estimate import Estimate
from noisescope.findings import BORDERLINE, NOT_RATED, Target


def named(found: Sections) -> list[str]:
    return [finding.component for finding in ranked_findings(found)]


def outliers(ratio: float, *, nonfinite: int = 0) -> ChannelAnalysis:
    row = ChannelRow(
        layer=1, operator="residual", module="model.layers.1", occurrence=0, outlier_indices=(3,),
        outlier_ratios=(ratio,), num_outliers=1, total_channels=64, outlier_percentage=1.6,
        nonfinite_channels=nonfinite, max_ratio=ratio, band="CRITICAL", median_max=1.0, global_max=ratio,
        rules=OutlierRules(1, 0, 0, None), sparsity=0.0, relative_sparsity=0.0, count=10,
    )  # fmt: skip
    return ChannelAnalysis("captured", "", 32, 10.0, None, {"model.layers.1 (residual)": row}, ())


def test_a_p_of_exactly_zero_is_the_most_significant_of_all() -> None:
    """A layer that loses 90 %, beyond what a double can hold as p, leads as CRITICAL."""
    found = sections(layers={0: lost(0.9, p=0.0), 1: lost(0.0, p=1.0), 2: lost(0.0, p=1.0)})
    first = ranked_findings(found)[0]
    assert (first.component, first.severity) == ("layer 0", "CRITICAL")


def test_a_label_is_decided_by_the_interval_not_by_the_point() -> None:
    """12 % known to plus or minus 10 points may be low or critical: borderline; known to 1 point it is HIGH."""
    wide, narrow = lost(0.12, half=0.10, p=0.01), lost(0.12, half=0.01, p=0.001)
    (finding,) = ranked_findings(sections(layers={0: wide, 1: predicted(0.0)}))
    assert finding.severity == BORDERLINE and "from LOW to CRITICAL" in finding.statement
    assert ranked_findings(sections(layers={0: narrow}))[0].severity == "HIGH"


def test_a_loss_that_is_not_significant_has_no_band() -> None:
    """However large the point value is."""
    found = sections(layers={0: lost(0.3, half=0.35, p=0.2), 1: predicted(0.001), 2: predicted(0.001)})
    assert [finding.severity for finding in ranked_findings(found)] == [NOT_RATED]


def test_a_window_collapses_into_the_layer_that_accounts_for_it() -> None:
    """Noise in layers 0 to 2 costs hardly more than noise in layer 0: layer 0 is the finding, with a note."""
    found = sections(
        windows={(0, 2): lost(0.32, bands="window"), (1, 3): lost(0.0, p=1.0), (3, 5): lost(0.0, p=1.0)},
        layers={0: lost(0.30), 1: lost(0.0, p=1.0), 2: lost(0.0, p=1.0)},
    )
    (finding,) = [one for one in ranked_findings(found) if one.rated]
    assert finding.component == "layer 0"
    assert finding.notes == ("layers 0 to 2: 32.0 % lost, not detectably more than here",)


def test_a_part_is_no_milder_than_the_whole_that_it_accounts_for() -> None:
    """The window's loss is certain to be high; that of its layer alone is borderline and can't be told from it."""
    found = sections(
        windows={(0, 2): lost(0.25, half=0.03, bands="window")},
        layers={0: lost(0.22, half=0.18, p=0.01), 1: lost(0.0, p=1.0), 2: lost(0.0, p=1.0)},
    )
    (finding,) = [one for one in ranked_findings(found) if one.rated]
    assert (finding.component, finding.severity) == ("layer 0", "CRITICAL")


def test_it_collapses_all_the_way_to_the_operator_in_the_layer() -> None:
    """Operator everywhere, window, layer: all lose what one operator of one layer loses."""
    found = sections(
        operators={"gemm": lost(0.33)},
        windows={(0, 2): lost(0.32, bands="window")},
        layers={0: lost(0.31)},
        cells={(0, "matmul"): lost(0.30)},
    )
    (finding,) = [one for one in ranked_findings(found) if one.rated]
    assert finding.component == "layer 0, matmul" and len(finding.notes) == 2
    whole = whole_model(found)
    assert whole is not None and whole.component == "the whole model" and whole.severity == "CRITICAL"


def test_samples_decide_what_a_whole_adds() -> None:
    """The same two losses: the layer is the finding unless the window loses significantly more, sample by sample."""
    found = sections(windows={(0, 2): lost(0.32, bands="window")}, layers={0: lost(0.30), 1: lost(0.0, p=1.0)})
    for low, component in ((-0.01, "layer 0"), (0.01, "layers 0 to 2")):
        ranked = ranked_findings(found, lambda whole, part, low=low: Estimate(0.02, low, 0.05, 100))  # type: ignore[misc]
        assert [one.component for one in ranked if one.rated] == [component]


def test_an_operator_everywhere_does_not_hide_the_layers() -> None:
    """linear is rated as an operator; the layers that stand out are listed behind it, lm_head too."""
    quiet = {layer: predicted(0.001) for layer in range(6)}
    found = sections(operators={"softmax": lost(0.3), "gemm": lost(0.0, p=1.0)}, layers={**quiet, 4: predicted(0.01)},
                     places={"lm_head": predicted(0.05)}, cells={(2, "softmax"): predicted(0.004)})  # fmt: skip
    assert named(found) == ["operator softmax", "lm_head", "layer 4", "layer 2, softmax"]


def test_an_operator_is_a_finding_where_no_layers_were_measured() -> None:
    """Without places to name, noise in all products is a finding like others."""
    found = replace(sections(operators={"gemm": lost(0.4)}), layer_analysis=None)
    assert named(found) == ["operator gemm"] and whole_model(found) is None


def test_a_window_stays_where_no_layer_accounts_for_it() -> None:
    """Errors that compound are a fact about the window; the largest part is a note, not a second finding."""
    found = sections(
        windows={(0, 2): lost(0.5, bands="window")}, layers={0: lost(0.1), 1: lost(0.08), 2: lost(0.0, p=1.0)}
    )
    (finding,) = [one for one in ranked_findings(found) if one.rated]
    assert finding.component == "layers 0 to 2" and finding.notes == ("layer 0 alone: 10.0 % lost",)


def test_overlapping_windows_are_one_region() -> None:
    """One hot layer lifts every window that holds it: the largest is named."""
    found = sections(
        windows={
            (0, 2): lost(0.30, bands="window"),
            (1, 3): lost(0.33, bands="window"),
            (2, 4): lost(0.31, bands="window"),
        }
    )
    assert named(found) == ["layers 1 to 3"]


def test_a_cell_outside_the_noised_operators_is_no_part_of_a_layer() -> None:
    """Layers are noised in their products: softmax in the same layer is another fact."""
    found = sections(layers={0: lost(0.30)}, cells={(0, "softmax"): lost(0.29)})
    assert sorted(named(found)) == ["layer 0", "layer 0, softmax"]


def test_a_screen_leads_with_the_largest_predicted_nats() -> None:
    """lm_head is 80 times the median layer, and outliers of the residual stream are huge: lm_head leads."""
    found = sections(
        layers={layer: predicted(0.001) for layer in range(8)} | {3: predicted(0.004)},
        places={"lm_head": predicted(0.08), "embed": predicted(0.0011)},
        channels=outliers(5000.0),
    )
    assert named(found) == ["lm_head", "layer 3", "model.layers.1 (residual)"]
    first = ranked_findings(found)[0]
    assert first.statement == "noise here is predicted to move the output by 0.08 nats per token"
    assert first.notes[0] == "80 times the median layer"


def test_channels_that_are_not_finite_come_first() -> None:
    """A model that gives NaN without noise has a worse problem than sensitivity."""
    found = sections(layers={0: lost(0.5)}, channels=outliers(20.0, nonfinite=2))
    assert named(found)[0] == "model.layers.1 (residual)"


def test_sentences_name_the_metric() -> None:
    """Losses of next-token accuracy are not called accuracy."""
    row = replace(lost(0.3), metric="next_token_accuracy")
    assert "30.0 % of the next-token accuracy (" in ranked_findings(sections(layers={0: row}))[0].statement


def test_recommendations_follow_the_findings() -> None:
    """Same order, same names; outliers of the residual stream are advice for W8A8 and never the most urgent."""
    found = sections(
        layers={0: lost(0.3), 1: lost(0.0, p=1.0, moved=0.001), 2: lost(0.0, p=1.0, moved=0.001)},
        places={"lm_head": predicted(0.08)},
        channels=outliers(5000.0),
    )
    ranked = ranked_findings(found)
    wanted = recommendations(found, ranked)
    assert [one.component for one in wanted] == [one.component for one in ranked]
    assert [one.priority for one in wanted] == ["CRITICAL", "MEDIUM", "LOW"]


@pytest.mark.parametrize(
    ("score", "loss", "level"),
    [("LOW", lost(0.4), "HIGH"), ("LOW", lost(0.08), "MODERATE"), ("HIGH", lost(0.08), "HIGH")],
)
def test_the_risk_is_no_lower_than_the_worst_finding(score: str, loss: object, level: str) -> None:
    """A CRITICAL finding under a LOW score is HIGH risk, and a HIGH score stays HIGH."""
    ranked = ranked_findings(sections(layers={0: loss}))  # type: ignore[dict-item]
    assert overall_risk(score, ranked, 0.01)[0] == level


def test_a_borderline_loss_keeps_the_risk_from_being_called_low() -> None:
    """Between low and high the run can't tell, and says so."""
    ranked = ranked_findings(sections(layers={0: lost(0.12, half=0.1, p=0.01)}))
    level, meaning = overall_risk("LOW", ranked, 0.01)
    assert level == "not measurable" and "layer 0" in meaning


def test_groups_stand_for_their_parts() -> None:
    """gemm was measured as such: linear and matmul are not counted beside it."""
    assert counted_once(["gemm", "linear", "matmul", "softmax"]) == ["gemm", "softmax"]


def test_targets_hold_their_parts_and_nothing_else() -> None:
    """Everywhere holds layers; a layer's products hold its matmul, not its softmax; nothing holds itself."""
    layer, window = Target("layer", ("gemm",), (1,)), Target("window", ("gemm",), (0, 1, 2))
    assert window.contains(layer) and not layer.contains(window) and not layer.contains(layer)
    assert layer.contains(Target("cell", ("matmul",), (1,))) and not layer.contains(Target("cell", ("softmax",), (1,)))
    assert Target("operator", ("softmax",)).contains(Target("cell", ("softmax",), (4,)))
    assert not Target("place", place="lm_head").contains(layer) and not layer.contains(Target("place", place="lm_head"))


def test_a_predicted_part_is_no_share_of_a_measurement() -> None:
    """What was injected into the whole and predicted for the part are named apart; of the same kind it is a share."""
    rest = {layer: predicted(0.001) for layer in range(1, 8)}
    cells = {(0, "linear"): predicted(0.092)}
    screened = ranked_findings(sections(layers={0: predicted(0.1)} | rest, cells=cells))[0]
    assert "92 % of it in layer 0, linear" in screened.notes
    injected = replace(predicted(0.1), evidence="injected")
    mixed = ranked_findings(sections(layers={0: injected} | rest, cells=cells))[0]
    assert "most of it in layer 0, linear (predicted: 0.092 nats per token)" in mixed.notes
