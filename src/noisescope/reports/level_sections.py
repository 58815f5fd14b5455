"""Operators and layers as sections: tables, the chart of windows, and the heat map."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from noisescope.diagnosis.rows import AvalanchePoint, CellEffect, Effect, Interaction, LayerAnalysis, WindowEffect
from noisescope.findings import LIMITS
from noisescope.reports.document import Bar, Block, Cell, Chart, HeatMap, Paragraph, Section, Table
from noisescope.reports.values import DiagnosisReport
from noisescope.reports.words import (
    ONE_SIDED,
    band,
    band_of,
    capitalised,
    divergence,
    estimate,
    metric_name,
    number,
    plain,
    run_metric,
    span,
    text,
    whole,
)
from noisescope.stats import Estimate

KL = ("KL injected", "KL predicted", "evidence")
STAR = "injected; without a star predicted by the Fisher screen, on the scale of injected cells"


def operators(report: DiagnosisReport) -> Iterable[Section]:
    if not report.operator_analysis:
        return
    ordered = sorted(report.operator_analysis.items(), key=lambda pair: _order(pair[1]))
    body = tuple(
        (text(name), *_loss(row), plain(row.sensitivity_score), *_divergence(row), whole(row.total_injections))
        for name, row in ordered
    )
    head = ("operator", f"{metric_name(run_metric(report.run))} lost", "band", "sensitivity score", *KL, "injections")
    yield Section("operators", "Operators", (Table("operators", head, body),))


def layers(report: DiagnosisReport) -> Iterable[Section]:
    if report.layer_analysis is not None:
        yield from layer_sections(report.layer_analysis, metric_name(run_metric(report.run)))


def layer_sections(section: LayerAnalysis, metric: str) -> Iterable[Section]:
    """The layers and the heat map; `metric` in words."""
    blocks: list[Block] = [*_window_chart(section, metric), *_points(section, metric)]
    columns = (f"{metric} lost", "band")
    windows = tuple(
        (text(row.layer_range), *_loss(row), _interaction(row.interaction_index), *_divergence(row))
        for row in section.windows
    )
    blocks.append(Table("windows", ("window", *columns, "interaction index", *KL), windows, "Sliding windows"))
    named: list[tuple[str, Effect]] = [(f"layer {row.layer}", row) for row in section.layers]
    named += section.places.items()
    singles = tuple((text(name), *_loss(row), *_divergence(row)) for name, row in named)
    blocks.append(Table("layers", ("place", *columns, *KL), singles, "Single layers and places"))
    if section.prediction_scale != 1:
        blocks.append(Paragraph(_scaled(section.prediction_scale)))
    yield Section("layers", f"Layers (noise on {', '.join(section.operators)})", tuple(blocks))
    yield from _map(section, metric)


def _window_chart(section: LayerAnalysis, metric: str) -> Iterable[Chart]:
    """What each window loses; where nothing was injected, its predicted divergence."""
    states = {point.layer_range: point for point in section.avalanche_points}
    known = [(row, row.degradation) for row in section.windows if row.degradation is not None]
    losses = [(row, loss) for row, loss in known if loss.value is not None]
    if losses:
        bars = tuple(_loss_bar(row, loss, states.get(row.layer_range)) for row, loss in losses)
        yield Chart("windows-chart", f"{capitalised(metric)} lost by window", f"share of the {metric}", bars)
        return
    predicted = [(row, row.predicted_kl) for row in section.windows if row.predicted_kl is not None]
    if predicted:
        bars = tuple(Bar(row.layer_range, divergence(kl), kl.typical.low, kl.typical.high) for row, kl in predicted)
        yield Chart("windows-chart", "Predicted divergence by window", "nats per token", bars)


def _loss_bar(row: WindowEffect, loss: Estimate, point: AvalanchePoint | None) -> Bar:
    cell = replace(loss_cell(row), tone=band_of(row).tone)
    if point is None:
        return Bar(row.layer_range, cell, loss.low, loss.high)
    mark = "avalanche point" if point.decided else "avalanche point (borderline)"
    return Bar(row.layer_range, cell, loss.low, loss.high, mark, not point.decided)


def _points(section: LayerAnalysis, metric: str) -> Iterable[Block]:
    if not any(row.injected for row in section.windows):
        yield Paragraph("Avalanche points and compounding errors were not looked for: no noise was injected.")
        return
    if section.avalanche_points:
        head = ("layers", "state", "severity", f"{metric} lost", "over the costlier neighbour", "layers in common")
        body = tuple(map(_point, section.avalanche_points))
        yield Table("avalanche-points", head, body, "Avalanche points")
    else:
        yield Paragraph("none", "Avalanche points:")
    yield Paragraph(", ".join(section.compounding) or "no window", "Errors compound significantly in:")
    yield Paragraph(
        f"An avalanche point is a window that costs more than {100 * LIMITS['avalanche_degradation']:g} % of the "
        f"{metric}, and more than {LIMITS['avalanche_neighbour_factor']:g} times what the windows beside it cost; it "
        "is borderline where its point values pass these limits and the intervals do not. The interaction index is the "
        "KL of a window over the sum of the KL of its layers: significantly above 1, errors compound."
    )


def _point(point: AvalanchePoint) -> tuple[Cell, ...]:
    first, last = point.common
    return (
        text(point.layer_range),
        text(point.state),
        band(point.severity),
        estimate(point.degradation, share=True),
        ratio(point.ratio),
        text(first if first == last else f"{first} to {last}"),
    )


def ratio(found: Estimate | None) -> Cell:
    """A ratio is printed with its interval or not at all."""
    if found is None or found.value is None or (found.low is None and found.high is None):
        return Cell("")
    return Cell(f"{number(found.value)} x", found.value, interval=span(found.low, found.high))


def _scaled(scale: float) -> str:
    return (
        f"Findings and the map rank rows that were only predicted by their typical KL times {number(scale)}, the "
        "median ratio of injected to predicted over the rows that have both."
    )


def _interaction(found: Interaction | None) -> Cell:
    """Printed with its interval or not at all."""
    if found is None:
        return Cell("")
    cell = estimate(found.index)
    if not cell.interval:
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
        parts.append(f"{metric} lost {loss_cell(row).text}")
    if row.nonlinear:
        parts.append("injection and prediction diverge: not linear here")
    return "; ".join([*parts, f"n = {known.typical.n}"])


# -- cells


def loss_cell(row: Effect) -> Cell:
    """The loss by which the band was decided; the largest of a table also corrected for its selection."""
    cell, selected = estimate(row.degradation, share=True), estimate(row.selected, share=True)
    if cell.value is None or selected.value is None or not row.significant:
        return cell
    return replace(cell, rest=f", corrected for selection {selected.text}, {ONE_SIDED}")


def _loss(row: Effect) -> tuple[Cell, Cell]:
    if row.evidence == "failed":
        return Cell(f"failed: {row.error}"[:120], tone="unsure"), Cell("")
    if not row.injected:
        return Cell(""), Cell("")
    return loss_cell(row), band_of(row)


def _divergence(row: Effect) -> tuple[Cell, Cell, Cell]:
    mark = " (nonlinear)" if row.nonlinear else ""
    return divergence(row.kl), divergence(row.predicted_kl), text(row.evidence + mark)


def _order(row: Effect) -> tuple[bool, float, float]:
    """The largest loss first, then by nats; what the model does not compute comes last."""
    loss = row.degradation
    lost = loss.value if loss is not None and loss.value is not None else -1.0
    return row.evidence == "absent", -lost, -row.nats
