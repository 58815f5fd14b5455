"""The pictures of a diagnosis: layers and operators, what each loses, what fewer bits cost, and the fault check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from noisescope.diagnosis.rows import AvalanchePoint, CellEffect, Effect, LayerAnalysis
from noisescope.plans.precision import modules_of
from noisescope.plans.precision_results import PlanRow, frontier
from noisescope.reports.cell_text import (
    ONE_SIDED,
    band_of,
    capitalised,
    divergence,
    estimate,
    mean,
    metric_name,
    number,
    run_metric,
    span,
)
from noisescope.reports.document import Bar, Cell, Chart, Curve, HeatMap
from noisescope.reports.saved_report import DiagnosisReport

STAR = "injected; all others are predicted by the screen, scaled to match injections"
MOST_POINTS = 60  # of a curve


def operator_chart(report: DiagnosisReport) -> Iterable[Chart]:
    """What each operator loses; where nothing was injected, its predicted divergence."""
    rows = [(name, row) for name, row in ranked_operators(report) if row.evidence not in ("absent", "failed")]
    yield from effect_chart("operators-chart", "operator", rows, metric_name(run_metric(report.run)))


def window_chart(section: LayerAnalysis, metric: str) -> Iterable[Chart]:
    """The same by window, with avalanche points marked."""
    points = {point.layer_range: point for point in section.avalanche_points}
    named = [(row.layer_range, row) for row in section.windows]
    for chart in effect_chart("windows-chart", "window of layers", named, metric):
        yield replace(chart, bars=tuple(_marked(bar, points.get(bar.label)) for bar in chart.bars))


def effect_chart(key: str, what: str, rows: Sequence[tuple[str, Effect]], metric: str) -> Iterable[Chart]:
    """Losses of rows where any was measured, else their divergence."""
    losses = [
        (name, row, loss) for name, row in rows if (loss := row.degradation) is not None and loss.value is not None
    ]
    if losses:
        bars = tuple(
            Bar(name, replace(loss_cell(row), tone=band_of(row).tone), loss.low, loss.high)
            for name, row, loss in losses
        )
        yield Chart(key, f"{capitalised(metric)} lost by {what}", f"share of the {metric} lost", bars)
        return
    known = [(name, row, kl) for name, row in rows if (kl := row.divergence) is not None]
    if known:
        bars = tuple(Bar(name, divergence(kl), kl.typical.low, kl.typical.high) for name, _, kl in known)
        title = "Divergence" if any(row.injected for _, row, _ in known) else "Predicted divergence"
        yield Chart(key, f"{title} by {what}", "typical KL, nats per token", bars)


def _marked(bar: Bar, point: AvalanchePoint | None) -> Bar:
    if point is None:
        return bar
    mark = "avalanche point" if point.decided else "avalanche point (borderline)"
    return replace(bar, mark=mark, undecided=not point.decided)


def heat_map(section: LayerAnalysis, metric: str) -> HeatMap | None:
    """Layer x operator, KL in nats; a star marks what was injected. Above it whole layers and other places."""
    names = tuple(dict.fromkeys(row.operator for row in section.map))
    places = tuple(sorted({row.layer for row in section.map}))
    if not places:
        return None
    rows = {(row.layer, row.operator): row for row in section.map}
    grid = tuple(tuple(rows.get((place, name)) for name in names) for place in places)
    whole = {row.layer: row for row in section.layers}
    strip = [_strip_bar(f"layer {place}", whole[place]) for place in places if place in whole]
    strip += [_strip_bar(name, row) for name, row in section.places.items() if row.divergence is not None]
    return HeatMap(
        "map",
        "By layer and operator: divergence of the output",
        "nats per token",
        tuple(f"layer {place}" for place in places),
        names,
        tuple(tuple(None if row is None else _heat(row) for row in line) for line in grid),
        tuple(tuple("" if row is None else _hover(row, metric) for row in line) for line in grid),
        STAR,
        tuple(strip) if len(strip) >= len(places) else (),
        f"By layer ({', '.join(section.operators)}): divergence of the output, nats per token",
    )


def _strip_bar(name: str, row: Effect) -> Bar:
    """By the nats that rank rows; the interval of a prediction is on the same scale."""
    known = row.divergence
    if known is None or known.typical.value is None:
        return Bar(name, Cell(row.evidence))
    typical = known.typical
    factor = row.nats / typical.value if typical.value else 1.0
    low, high = (None if end is None else end * factor for end in (typical.low, typical.high))
    tone = band_of(row).tone if row.significant else ""
    rest = f", {row.evidence}, n = {typical.n}"
    return Bar(name, Cell(number(row.nats), row.nats, tone, span(low, high), rest), low, high)


def _heat(row: CellEffect) -> Cell:
    """By the nats that rank rows: those of predicted cells are on the scale of injected ones."""
    known = row.divergence
    if known is None or known.typical.value is None:
        return Cell(row.evidence)
    return Cell(number(row.nats), row.nats, starred=row.injected)


def _hover(row: CellEffect, metric: str) -> str:
    known = row.divergence
    if known is None:
        return row.error or "unknown"
    parts = [f"{row.evidence} KL {divergence(known).text or 'unknown'}"]
    if row.injected and row.predicted_kl is not None:
        parts.append(f"predicted {divergence(row.predicted_kl).text}")
    if row.degradation is not None and row.degradation.value is not None:
        parts.append(f"{metric} lost {loss_cell(row).text}")
    if row.nonlinear:
        parts.append("injected and predicted KL differ: the response is not linear here")
    return "; ".join([*parts, f"n = {known.typical.n}"])


def loss_cell(row: Effect) -> Cell:
    """The loss by which the band was decided; the largest of a table also corrected for its selection."""
    cell, selected = estimate(row.degradation, share=True), estimate(row.selected, share=True)
    if cell.value is None or selected.value is None or not row.significant:
        return cell
    return replace(cell, rest=f", corrected for selection {selected.text}, {ONE_SIDED}")


def ranked_operators(report: DiagnosisReport) -> list[tuple[str, Effect]]:
    """The largest loss first; what the model does not compute comes last."""
    return sorted((report.operator_analysis or {}).items(), key=lambda pair: _order(pair[1]))


def _order(row: Effect) -> tuple[bool, float, float]:
    """The largest loss first, then by nats; what the model does not compute comes last."""
    loss = row.degradation
    lost = loss.value if loss is not None and loss.value is not None else -1.0
    return row.evidence == "absent", -lost, -row.nats


# -- plans and the fault check


def pareto(report: DiagnosisReport) -> Iterable[Curve]:
    """What fewer bits cost: the best mixes as predicted, uniform formats, and plans that were carried out."""
    scores, plan = report.format_scores, report.precision_plan
    if scores is None or not scores.modules:
        return
    rows = () if plan is None else plan.rows
    marked = [
        (row.average_bits, Bar(_short_name(row), mean(row.kl.mean), row.kl.mean.low, row.kl.mean.high))
        for row in rows
        if row.kl.mean.value
    ]
    if not marked:
        uniform = ((name, row) for name, row in scores.uniform.items() if row.predicted_kl > 0)
        marked = [
            (row.bits, Bar(name, Cell(number(row.predicted_kl), row.predicted_kl), undecided=True))
            for name, row in uniform
        ]
    widest = max((bits for bits, _ in marked), default=math.inf)
    points = [(bits, cost) for bits, cost in frontier(modules_of(report)) if cost > 0 and bits <= widest]
    points = points[:: max(1, len(points) // MOST_POINTS)]
    line = tuple((bits, Bar(f"{bits:.2f} bits per weight", Cell(number(cost), cost))) for bits, cost in points)
    yield Curve(
        "pareto", "What fewer bits per weight cost", "bits per weight, scales not counted",
        "mean KL of the output, nats per token", line, marked=tuple(marked), line="best mix of formats, as predicted",
    )  # fmt: skip


def _short_name(row: PlanRow) -> str:
    return "this plan" if row.kind == "plan" else row.format or row.name


def check_chart(report: DiagnosisReport) -> Iterable[Chart]:
    """What one fault costs in each window: most where the report warns, if the report is right."""
    section = report.check
    if section is None:
        return
    marks = {"warned": "the report warns here", "least": "least, according to the report", "between": ""}
    known = [(row, row.degradation) for row in section.windows if row.degradation is not None]
    bars = tuple(
        Bar(
            f"{row.start_layer} to {row.end_layer}", replace(estimate(loss, share=True), tone=band_of(row).tone),
            loss.low, loss.high, marks[row.role], row.role == "least",
        )
        for row, loss in known
    )  # fmt: skip
    metric = metric_name(section.windows[0].metric if section.windows else run_metric(report.run))
    title = f"Was it right? {capitalised(metric)} lost to a simulated fault, by layers"
    yield Chart("check-chart", title, f"share of the {metric} lost to {section.fault}", bars)
