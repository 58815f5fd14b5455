"""What a diagnosis measured, as sections: operators, layers with the heat map, channels, number formats, metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from noisescope.diagnosis.rows import AvalanchePoint, Effect, Interaction, LayerAnalysis
from noisescope.diagnosis.section_types import ChannelRow, Metrics
from noisescope.findings import LIMITS
from noisescope.findings.finding import counted
from noisescope.reports.cell_text import (
    SHARES,
    band,
    band_between,
    band_of,
    described,
    estimate,
    metric_name,
    number,
    point_band,
    run_metric,
    span,
    table,
)
from noisescope.reports.diagnosis_charts import heat_map, loss_cell, ranked_operators
from noisescope.reports.document import (
    Block,
    Cell,
    Details,
    HeatTable,
    Paragraph,
    Section,
    Table,
)
from noisescope.reports.saved_report import DiagnosisReport

WORST = 10  # rows of a table that only shows the worst
KL = ("KL injected", "KL predicted", "evidence")
_PAIRS = {
    "hessian_sensitivity": "Hessian trace and sensitivity",
    "outliers_sensitivity": "outlier channels and sensitivity",
    "sparsity_degradation": "activation sparsity and degradation",
    "outliers_windows": "outlier channels and loss, by window",
}


# -- operators and layers


def operators(report: DiagnosisReport) -> Iterable[Section]:
    if not report.operator_analysis:
        return
    scored = report.run.settings.question is None  # a number format has no scale to divide a loss by
    rows = [
        (name, *_loss(row), *((row.sensitivity_score,) if scored else ()), *_divergence(row), row.total_injections)
        for name, row in ranked_operators(report)
    ]
    score = ("sensitivity score",) if scored else ()
    head = ("operator", f"{metric_name(run_metric(report.run))} lost", "band", *score, *KL, "injections")
    yield Section("operators", "Operators", (folded(table("operators", head, rows, "Operators"), "row"),))


def folded(found: Table, what: str) -> Details:
    """A table behind one line that says what is in it."""
    return Details(f"{found.caption or 'Table'}: {counted(len(found.rows), what)}", (replace(found, caption=""),))


def layers(report: DiagnosisReport) -> Iterable[Section]:
    if report.layer_analysis is not None:
        question = report.run.settings.question
        injected = "" if question is None else question.name
        yield from layer_sections(report.layer_analysis, metric_name(run_metric(report.run)), injected)


def layer_sections(section: LayerAnalysis, metric: str, injected: str = "") -> Iterable[Section]:
    """The layers, and the numbers of the heat map; `metric` in words, and what was injected if not noise."""
    columns = (f"{metric} lost", "band")
    windows = (
        (row.layer_range, *_loss(row), _interaction(row.interaction_index), *_divergence(row))
        for row in section.windows
    )
    named: list[tuple[str, Effect]] = [(f"layer {row.layer}", row) for row in section.layers]
    singles = ((name, *_loss(row), *_divergence(row)) for name, row in [*named, *section.places.items()])
    heat = heat_map(section, metric)
    blocks: list[Block] = [
        *_avalanches(section, metric),
        folded(table("windows", ("window", *columns, "interaction index", *KL), windows, "Sliding windows"), "window"),
        folded(table("layers", ("place", *columns, *KL), singles, "Single layers and places"), "place"),
        *([] if heat is None else [Details("Layer x operator map: every number", (HeatTable(heat),))]),
    ]
    if section.prediction_scale != 1:
        scaled = (
            "Findings and the map put predictions on the scale of injections: they multiply a predicted KL by "
            f"{number(section.prediction_scale)}, the median ratio of injected to predicted KL over the rows that have "
            "both."
        )
        blocks.append(Paragraph(scaled))
    title = f"Layers ({injected or 'noise on ' + ', '.join(section.operators)})"
    yield Section("layers", title, tuple(blocks))


def _avalanches(section: LayerAnalysis, metric: str) -> Iterable[Block]:
    if not any(row.injected for row in section.windows):
        yield Paragraph("No noise was injected, so avalanche points and compounding errors were not searched for.")
        return
    if section.avalanche_points:
        head = ("layers", "state", "severity", f"{metric} lost", "over the costlier neighbour", "layers in common")
        found = table("avalanche-points", head, map(_avalanche, section.avalanche_points), "Avalanche points")
        yield folded(found, "window")
    else:
        yield Paragraph("none", "Avalanche points:")
    yield Paragraph(", ".join(section.compounding) or "none", "Windows in which errors compound significantly:")
    yield Paragraph(
        f"An avalanche point is a window that loses more than {100 * LIMITS['avalanche_degradation']:g} % of "
        f"the {metric} and more than {LIMITS['avalanche_neighbour_factor']:g} times as much as its neighbours. It "
        "is borderline if only the point estimates exceed these limits, not the intervals. The interaction index is "
        "the KL of a window divided by the sum of the KLs of its layers; errors compound where it is significantly "
        "above 1."
    )


def _avalanche(point: AvalanchePoint) -> tuple[object, ...]:
    (first, last), ratio = point.common, point.ratio
    over = Cell("")  # a ratio is printed with its interval or not at all
    if ratio is not None and ratio.value is not None and (ratio.low is not None or ratio.high is not None):
        over = Cell(f"{number(ratio.value)} x", ratio.value, interval=span(ratio.low, ratio.high))
    common = str(first) if first == last else f"{first} to {last}"
    loss = estimate(point.degradation, share=True)
    return point.layer_range, point.state, band(point.severity), loss, over, common


def _interaction(found: Interaction | None) -> Cell:
    """Printed with its interval or not at all."""
    cell = estimate(None if found is None else found.index)
    if found is None or not cell.interval:
        return Cell("")
    return replace(cell, rest=", layers predicted") if found.of == "predicted" else cell


def _loss(row: Effect) -> tuple[Cell, Cell]:
    if row.evidence == "failed":
        return Cell(f"failed: {row.error}"[:120], tone="unsure"), Cell("")
    return (loss_cell(row), band_of(row)) if row.injected else (Cell(""), Cell(""))


def _divergence(row: Effect) -> tuple[object, ...]:
    return row.kl, row.predicted_kl, row.evidence + (" (nonlinear)" if row.nonlinear else "")


# -- channels and number formats


def channels(report: DiagnosisReport) -> Iterable[Section]:
    section = report.channel_analysis
    if section is None:
        return
    blocks: list[Block] = []
    if section.error:
        blocks.append(Paragraph(section.error, "Not measured:"))
    if section.summary is not None:
        found = section.summary
        fisher = any(row.rules.fisher is not None for row in section.per_layer.values())
        last = "; and the 5 % of channels in which noise costs most (Fisher)" if fisher else ""
        blocks.append(
            Paragraph(
                f"{found.total_outlier_channels} outlier channels of {found.total_channels} "
                f"({found.outlier_percentage:.2g} %) in {counted(found.layers_with_outliers, 'module')}; "
                f"n = {section.n} samples. A channel is an outlier if its largest value exceeds "
                f"{section.threshold:g} times that of the median channel (by max). The other columns count outliers by "
                "other rules: by the mean instead of the maximum; by a 99th percentile above 5 times the channel's own "
                f"median (q99/q50){last}."
            )
        )
        worst = sorted(section.per_layer.items(), key=lambda pair: -pair[1].max_ratio)[:WORST]
        head = ("module", "outliers", "channels", "largest / median", "band", "by max", "by mean", "by q99/q50",
                "by Fisher")  # fmt: skip
        rows = ((name, *_outliers(row)) for name, row in worst)
        blocks.append(folded(table("outliers", head, rows, "Modules with the largest outliers"), "module"))
    if section.costliest:
        columns = ("module", "channel", "mean KL predicted", "mean KL injected", "evidence")
        costs = (
            (row.module, row.channel, row.predicted_nats, row.kl and row.kl.mean, row.evidence)
            for row in section.costliest[:WORST]
        )
        blocks.append(folded(table("costliest", columns, costs, "Channels in which noise costs most"), "channel"))
    yield Section("channels", "Channels", tuple(blocks))


def _outliers(row: ChannelRow) -> tuple[object, ...]:
    """How many, which (the largest four), and how many by each rule."""
    ratios = sorted(zip(row.outlier_ratios, row.outlier_indices, strict=False), reverse=True)
    which = ", ".join(str(index) for _, index in ratios[:4]) + (", ..." if len(ratios) > 4 else "")
    count = Cell(str(row.num_outliers), row.num_outliers, rest=f" of {row.total_channels}")
    largest, rules = Cell(f"{row.max_ratio:.1f} x", row.max_ratio), row.rules
    return count, which, largest, band(row.band), rules.max, rules.mean, rules.quantile, rules.fisher


def formats(report: DiagnosisReport) -> Iterable[Section]:
    """What one number format for all weights would cost; plans mix them."""
    section = report.format_scores
    if section is None or not section.uniform:
        return
    rows = ((name, row.bits, row.effective_bits, row.predicted_kl) for name, row in section.uniform.items())
    explained = (
        "The KL that one format for all weights would cost, in nats per token: predicted from the rounding error of "
        "each weight and summed over the linears of all blocks. The order is reliable, the size only approximate. "
        "`noisescope plan precision` mixes formats and measures the result."
    )
    head = ("format of every linear", "bits per weight", "with scales", "mean KL predicted")
    blocks = (Paragraph(explained), folded(table("formats", head, rows, "Uniform formats"), "format"))
    yield Section("formats", "Number formats for the weights", blocks)


# -- metrics and correlations


def metrics(report: DiagnosisReport) -> Iterable[Section]:
    found = report.metrics
    blocks: list[Block] = [folded(table("metrics", ("metric", "value", "band"), _metric_rows(found), "Metrics"), "row")]
    if found.baseline is not None:
        known = (
            (described(name), estimate(row, share=name in SHARES, n=True))
            for name, row in found.baseline.metrics.items()
            if name != "agreement"  # of the clean model with itself
        )
        blocks.append(folded(table("baseline", ("metric", "mean"), known, "The clean model"), "metric"))
    traces = found.hessian_trace
    if traces is not None and traces.error:
        blocks.append(Paragraph(traces.error, "Hessian traces were not measured:"))
    elif traces is not None and traces.layers:
        curved = (
            (
                Cell(f"layer {layer}", float(layer)),
                Cell(number(row.trace), row.trace, interval=span(row.low, row.high)),
                row.per_parameter,
            )
            for layer, row in sorted(traces.layers.items(), key=lambda pair: int(pair[0]))
        )
        hessian = table("hessian", ("layer", "trace", "per parameter"), curved, "Hessian trace of each layer")
        blocks.append(folded(hessian, "layer"))
    yield Section("metrics", "Metrics", tuple(blocks))


def _metric_rows(found: Metrics) -> Iterable[tuple[object, ...]]:
    primary, secondary = found.primary, found.secondary
    loss, index, snr = primary.relative_degradation, primary.noise_tolerance_index, secondary.snr_db
    loss_band = band_between("degradation", loss, primary.degradation_band)
    yield "relative degradation", estimate(loss, share=True, n=True), loss_band
    tolerance = band_between("noise_tolerance_index", index, primary.noise_tolerance_band)
    yield "noise tolerance index", estimate(index, n=True), tolerance
    limit = primary.critical_threshold
    if limit is not None:
        cell = Cell(limit.label, limit.value, interval=span(limit.low, limit.high), rest=f" (n = {limit.n})")
        yield "critical threshold", cell, band_between("critical_threshold", limit, limit.band)
    yield "SNR of the logits (dB)", estimate(snr, n=True), band_between("snr_db", snr, secondary.snr_band)
    gradients, sparsity = secondary.gradient_ratio, secondary.activation_sparsity
    if gradients is not None:
        cell = Cell(number(gradients.value), gradients.value, rest=f" (n = {gradients.n})")
        yield "gradient ratio", cell, point_band(gradients.point_band)
    if sparsity is not None:
        yield "activation sparsity", sparsity.relative, point_band(sparsity.point_band)


def correlations(report: DiagnosisReport) -> Iterable[Section]:
    """Whether what the original method notes expect holds: decided by the interval."""
    if not report.correlations:
        return
    rows = []
    for name, row in report.correlations.items():
        held = f"{row.held}, carried by one layer" if row.carried_by_one else row.held
        expected = (row.expected, held if row.expected else "")  # nothing held where nothing is expected
        rows.append((_PAIRS.get(name, name), row.correlation, *expected, row.without_one, row.correlation.n))
    head = ("pair", "r", "expected", "held", "r without the most influential layer", "n")
    explained = (
        "An expectation held if the whole interval meets its limit, failed if the whole interval misses it, and is "
        "undecided otherwise. A result is carried by one layer if leaving out that layer changes it."
    )
    correlated = folded(table("correlations", head, rows, "Correlations"), "pair")
    yield Section("correlations", "Correlations", (Paragraph(explained), correlated))
