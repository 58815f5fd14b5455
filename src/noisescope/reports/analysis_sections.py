"""What a diagnosis measured, as sections: operators, layers with the heat map, channels, number formats, metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from noisescope.diagnosis.rows import AvalanchePoint, CellEffect, Effect, Interaction, LayerAnalysis, WindowEffect
from noisescope.diagnosis.section_types import ChannelRow, Metrics
from noisescope.findings import LIMITS
from noisescope.findings.finding import counted
from noisescope.reports.document import Bar, Block, Cell, Chart, HeatMap, Paragraph, Section
from noisescope.reports.report_file import DiagnosisReport
from noisescope.reports.words import (
    ONE_SIDED,
    SHARES,
    band,
    band_between,
    band_of,
    capitalised,
    described,
    divergence,
    estimate,
    metric_name,
    number,
    point_band,
    run_metric,
    span,
    table,
)
from noisescope.stats import Estimate

WORST = 10  # rows of a table that only shows the worst
KL = ("KL injected", "KL predicted", "evidence")
STAR = "injected; without a star predicted by the screen, on the scale of injected cells"
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
    ordered = sorted(report.operator_analysis.items(), key=lambda pair: _order(pair[1]))
    scored = report.run.settings.question is None  # a number format has no scale to divide a loss by
    rows = [
        (name, *_loss(row), *((row.sensitivity_score,) if scored else ()), *_divergence(row), row.total_injections)
        for name, row in ordered
    ]
    score = ("sensitivity score",) if scored else ()
    head = ("operator", f"{metric_name(run_metric(report.run))} lost", "band", *score, *KL, "injections")
    yield Section("operators", "Operators", (table("operators", head, rows),))


def layers(report: DiagnosisReport) -> Iterable[Section]:
    if report.layer_analysis is not None:
        question = report.run.settings.question
        put_in = "" if question is None else question.name
        yield from layer_sections(report.layer_analysis, metric_name(run_metric(report.run)), put_in)


def layer_sections(section: LayerAnalysis, metric: str, put_in: str = "") -> Iterable[Section]:
    """The layers and the heat map; `metric` in words, and what was put in where that is not noise."""
    columns = (f"{metric} lost", "band")
    windows = (
        (row.layer_range, *_loss(row), _interaction(row.interaction_index), *_divergence(row))
        for row in section.windows
    )
    named: list[tuple[str, Effect]] = [(f"layer {row.layer}", row) for row in section.layers]
    singles = ((name, *_loss(row), *_divergence(row)) for name, row in [*named, *section.places.items()])
    blocks: list[Block] = [
        *_window_chart(section, metric),
        *_avalanches(section, metric),
        table("windows", ("window", *columns, "interaction index", *KL), windows, "Sliding windows"),
        table("layers", ("place", *columns, *KL), singles, "Single layers and places"),
    ]
    if section.prediction_scale != 1:
        scaled = (
            f"Findings and the map rank rows that were only predicted by their typical KL times "
            f"{number(section.prediction_scale)}, the median ratio of injected to predicted over the rows that have "
            "both."
        )
        blocks.append(Paragraph(scaled))
    title = f"Layers ({put_in or 'noise on ' + ', '.join(section.operators)})"
    yield Section("layers", title, tuple(blocks))
    yield from _map(section, metric)


def _window_chart(section: LayerAnalysis, metric: str) -> Iterable[Chart]:
    """What each window loses; where nothing was injected, its predicted divergence."""
    points = {point.layer_range: point for point in section.avalanche_points}
    losses = [
        (row, loss) for row in section.windows if (loss := row.degradation) is not None and loss.value is not None
    ]
    if losses:
        bars = tuple(_loss_bar(row, loss, points.get(row.layer_range)) for row, loss in losses)
        yield Chart("windows-chart", f"{capitalised(metric)} lost by window", f"share of the {metric}", bars)
        return
    predicted = [(row, row.predicted_kl) for row in section.windows if row.predicted_kl is not None]
    if predicted:
        bars = tuple(Bar(row.layer_range, divergence(kl), kl.typical.low, kl.typical.high) for row, kl in predicted)
        yield Chart("windows-chart", "Predicted divergence by window", "nats per token", bars)


def _loss_bar(row: WindowEffect, loss: Estimate, point: AvalanchePoint | None) -> Bar:
    bar = Bar(row.layer_range, replace(_loss_cell(row), tone=band_of(row).tone), loss.low, loss.high)
    if point is None:
        return bar
    mark = "avalanche point" if point.decided else "avalanche point (borderline)"
    return replace(bar, mark=mark, undecided=not point.decided)


def _avalanches(section: LayerAnalysis, metric: str) -> Iterable[Block]:
    if not any(row.injected for row in section.windows):
        yield Paragraph("Avalanche points and compounding errors were not looked for: no noise was injected.")
        return
    if section.avalanche_points:
        head = ("layers", "state", "severity", f"{metric} lost", "over the costlier neighbour", "layers in common")
        yield table("avalanche-points", head, map(_avalanche, section.avalanche_points), "Avalanche points")
    else:
        yield Paragraph("none", "Avalanche points:")
    yield Paragraph(", ".join(section.compounding) or "no window", "Errors compound significantly in:")
    yield Paragraph(
        f"An avalanche point is a window that costs more than {100 * LIMITS['avalanche_degradation']:g} % of the "
        f"{metric}, and more than {LIMITS['avalanche_neighbour_factor']:g} times what the windows beside it cost; it "
        "is borderline where its point values pass these limits and the intervals do not. The interaction index is the "
        "KL of a window over the sum of the KL of its layers: significantly above 1, errors compound."
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


def _map(section: LayerAnalysis, metric: str) -> Iterable[Section]:
    """Layer x operator, KL in nats; a star marks what was injected."""
    names = tuple(dict.fromkeys(row.operator for row in section.map))
    places = tuple(sorted({row.layer for row in section.map}))
    if not places:
        return
    rows = {(row.layer, row.operator): row for row in section.map}
    grid = tuple(tuple(rows.get((place, name)) for name in names) for place in places)
    heat = HeatMap(
        "map",
        "Divergence of the output, by layer and operator",
        "nats per token",
        tuple(f"layer {place}" for place in places),
        names,
        tuple(tuple(None if row is None else _heat(row) for row in line) for line in grid),
        tuple(tuple("" if row is None else _hover(row, metric) for row in line) for line in grid),
        STAR,
    )
    yield Section("map", "Layer x operator", (heat,))


def _heat(row: CellEffect) -> Cell:
    """By the nats that rank rows: those of predicted cells are on the scale of injected ones."""
    known = row.divergence
    if known is None or known.typical.value is None:
        return Cell(row.evidence)
    return Cell(number(row.nats), row.nats, starred=row.injected)


def _hover(row: CellEffect, metric: str) -> str:
    known = row.divergence
    if known is None:
        return row.error or "not known"
    parts = [f"{row.evidence} KL {divergence(known).text or 'not known'}"]
    if row.injected and row.predicted_kl is not None:
        parts.append(f"predicted {divergence(row.predicted_kl).text}")
    if row.degradation is not None and row.degradation.value is not None:
        parts.append(f"{metric} lost {_loss_cell(row).text}")
    if row.nonlinear:
        parts.append("injection and prediction diverge: not linear here")
    return "; ".join([*parts, f"n = {known.typical.n}"])


def _loss_cell(row: Effect) -> Cell:
    """The loss by which the band was decided; the largest of a table also corrected for its selection."""
    cell, selected = estimate(row.degradation, share=True), estimate(row.selected, share=True)
    if cell.value is None or selected.value is None or not row.significant:
        return cell
    return replace(cell, rest=f", corrected for selection {selected.text}, {ONE_SIDED}")


def _loss(row: Effect) -> tuple[Cell, Cell]:
    if row.evidence == "failed":
        return Cell(f"failed: {row.error}"[:120], tone="unsure"), Cell("")
    return (_loss_cell(row), band_of(row)) if row.injected else (Cell(""), Cell(""))


def _divergence(row: Effect) -> tuple[object, ...]:
    return row.kl, row.predicted_kl, row.evidence + (" (nonlinear)" if row.nonlinear else "")


def _order(row: Effect) -> tuple[bool, float, float]:
    """The largest loss first, then by nats; what the model does not compute comes last."""
    loss = row.degradation
    lost = loss.value if loss is not None and loss.value is not None else -1.0
    return row.evidence == "absent", -lost, -row.nats


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
        blocks.append(
            Paragraph(
                f"{found.total_outlier_channels} outlier channels of {found.total_channels} "
                f"({found.outlier_percentage:.2g} %) in {counted(found.layers_with_outliers, 'module')}; "
                f"n = {section.n} samples. "
                f"The largest value of an outlier is more than {section.threshold:g} times that of the median channel "
                "(by max). Other rules: the mean in place of the largest; a 99th percentile above 5 times the "
                "channel's own median (q99/q50); the 5 % whose noise costs most (Fisher)."
            )
        )
        worst = sorted(section.per_layer.items(), key=lambda pair: -pair[1].max_ratio)[:WORST]
        head = ("module", "outliers", "channels", "largest / median", "band", "by max", "by mean", "by q99/q50",
                "by Fisher")  # fmt: skip
        rows = ((name, *_outliers(row)) for name, row in worst)
        blocks.append(table("outliers", head, rows, "Modules with the largest outliers"))
    if section.costliest:
        columns = ("module", "channel", "mean KL predicted", "mean KL injected", "evidence")
        costs = (
            (row.module, row.channel, row.predicted_nats, row.kl and row.kl.mean, row.evidence)
            for row in section.costliest[:WORST]
        )
        blocks.append(table("costliest", columns, costs, "Channels whose noise costs most"))
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
        "Predicted from the rounding error of each weight, and added up over the linears of all blocks, in nats per "
        "token. Trust the order; the size is only rough. `noisescope plan precision` mixes formats and measures the "
        "result."
    )
    head = ("format of every linear", "bits per weight", "with scales", "mean KL predicted")
    yield Section("formats", "Number formats for the weights", (Paragraph(explained), table("formats", head, rows)))


# -- metrics and correlations


def metrics(report: DiagnosisReport) -> Iterable[Section]:
    found = report.metrics
    blocks: list[Block] = [table("metrics", ("metric", "value", "band"), _metric_rows(found))]
    if found.baseline is not None:
        known = (
            (described(name), estimate(row, share=name in SHARES, n=True))
            for name, row in found.baseline.metrics.items()
            if name != "agreement"  # of the clean model with itself
        )
        blocks.append(table("baseline", ("metric", "mean"), known, "The clean model"))
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
        blocks.append(table("hessian", ("layer", "trace", "per parameter"), curved, "Hessian trace of each layer"))
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
        "An expectation held where the whole interval clears its limit, did not hold where the whole interval misses "
        "it, and is undecided otherwise. It is carried by one layer where leaving out that layer changes the answer."
    )
    correlated = table("correlations", head, rows)
    yield Section("correlations", "Correlations", (Paragraph(explained), correlated))
