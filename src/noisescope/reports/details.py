"""What the last pages hold: the two raw risk scores, and the point rules of the original method notes."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.diagnosis.rows import Effect
from noisescope.findings import Risk
from noisescope.reports.document import Block, Cell, Paragraph, Section, Table
from noisescope.reports.values import DiagnosisReport
from noisescope.reports.words import band, metric_name, percent, plain, run_metric, text


def risk_scores(report: DiagnosisReport) -> Iterable[Section]:
    """Both scores with their terms: they answer different questions and may differ."""
    found = report.executive_summary
    body = (
        _risk("report score (what the diagnosis found)", found.report_risk),
        _risk("dashboard score (the metrics)", found.dashboard_risk),
    )
    explained = (
        "The risk of this report is the higher of the report score's level and its worst significant finding; with too "
        "few samples to detect a loss that matters it is not measurable, whatever the scores say. The dashboard score "
        "looks at the point value of the loss under noise in all products alone."
    )
    table = Table("risk-scores", ("score", "points", "level", "made of"), body)
    yield Section("risk-scores", "Risk scores", (Paragraph(explained), table))


def _risk(name: str, risk: Risk) -> tuple[Cell, ...]:
    terms = [term.reason if term.points is None else f"{term.reason} (+{term.points:g})" for term in risk.terms]
    points = Cell(f"{risk.score:g}", risk.score)
    return text(name), points, band(risk.level), text(", ".join(terms) or "nothing counted")


def point_rules(report: DiagnosisReport) -> Iterable[Section]:
    """The labels that point values alone would get."""
    rows = [(name, row) for name, row in _rows(report) if row.point_rule is not None]
    points = () if report.layer_analysis is None else report.layer_analysis.point_rule_avalanches
    if not rows and not points:
        return
    metric = metric_name(run_metric(report.run))
    explained = (
        "The original method notes label a row by its point value alone. These labels are given for comparison with "
        "their rules; they ignore the intervals, so a label here may differ from the band of the same row above, "
        "which is the one that counts."
    )
    blocks: list[Block] = [Paragraph(explained)]
    if rows:
        head = ("row", f"{metric} lost", "band by point value", "sensitivity score", "score band by point value")
        blocks.append(Table("point-rules", head, tuple(_labels(name, row) for name, row in rows)))
    if points:
        head = ("layers", f"{metric} lost", "severity", "neighbours", "layers in common")
        body = tuple(
            (
                text(f"{point.start} to {point.end}"),
                Cell(percent(point.degradation), point.degradation),
                band(point.severity),
                text(", ".join(map(percent, point.neighbours))),
                text(f"{point.common[0]} to {point.common[1]}"),
            )
            for point in points
        )
        blocks.append(Table("point-rule-avalanches", head, body, "Avalanche points by point values"))
    yield Section("point-rules", "Point rules of the original method notes", tuple(blocks))


def _rows(report: DiagnosisReport) -> Iterable[tuple[str, Effect]]:
    if report.operator_analysis is not None:
        yield from report.operator_analysis.items()
    if report.layer_analysis is not None:
        yield from ((f"layers {row.layer_range}", row) for row in report.layer_analysis.windows)
        yield from ((f"layer {row.layer}", row) for row in report.layer_analysis.layers)
        yield from report.layer_analysis.places.items()


def _labels(name: str, row: Effect) -> tuple[Cell, ...]:
    assert row.point_rule is not None
    value = None if row.degradation is None else row.degradation.value
    rule = row.point_rule
    return (
        text(name),
        Cell(percent(value), value),
        band(rule.degradation_band),
        plain(row.sensitivity_score),
        band(rule.sensitivity_band),
    )
