"""From a report to a document: what comes first for a reader, and what stands around the levels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from noisescope.comparison.roundoff import Roundoff
from noisescope.diagnosis.format_question import Question
from noisescope.diagnosis.report import Robustness, RobustnessCurve, Run
from noisescope.diagnosis.rows import Effect
from noisescope.findings import Risk
from noisescope.findings.finding import counted
from noisescope.reports import analysis_sections as analysis
from noisescope.reports import plan_sections as plans
from noisescope.reports.analysis_sections import folded
from noisescope.reports.cell_text import (
    SHARES,
    band,
    band_of,
    capitalised,
    described,
    estimate,
    metric_name,
    percent,
    run_metric,
    table,
)
from noisescope.reports.document import Bar, Block, Bullets, Cell, Curve, Details, Document, Paragraph, Section
from noisescope.reports.first_screen import facts, in_pictures, run_facts, summary
from noisescope.reports.next_steps import run_command
from noisescope.reports.roundoff_sections import roundoff_sections
from noisescope.reports.saved_report import TITLE, DiagnosisReport

FIRST = 5  # recommendations that are not folded
_HOW = {"score": "teacher-forced", "generate": "by generation", "custom": "by the caller's own metric"}


def document_of(report: DiagnosisReport | Robustness | Roundoff) -> Document:
    """The order a reader needs: verdict, pictures, what to do, the evidence, the method, the limits."""
    if isinstance(report, Roundoff):
        sections = [*roundoff_sections(report), *limits(report.could_not_see)]
        return Document(TITLE, tuple(run_facts(report.run, "round-off")), tuple(sections), report.run.finished)
    if isinstance(report, Robustness):
        noise = f"levels {', '.join(f'{row.noise_level:g}' for row in report.robustness.levels)}"
        sections = [robustness(report.robustness, run_metric(report.run)), method(report.run, diverging=False)]
        sections += limits(report.could_not_see)
        top = tuple(run_facts(report.run, noise))
        return Document(TITLE, top, tuple(sections), report.run.finished, run_command(report.run))
    first = (summary, in_pictures, recommendations)
    advice = (plans.migration, plans.precision, plans.check, plans.locate)
    evidence = (analysis.operators, analysis.layers, analysis.channels, analysis.formats, analysis.metrics)
    last = (analysis.correlations, risk_scores, point_rules)
    sections = [section for part in (*first, *advice, *evidence, *last) for section in part(report)]
    sections += [method(report.run, diverging=True), *limits(report.could_not_see)]
    return Document(TITLE, tuple(facts(report)), tuple(sections), report.run.finished, run_command(report.run))


def recommendations(report: DiagnosisReport) -> Iterable[Section]:
    if report.recommendations:
        head = ("priority", "component", "issue", "action")
        rows = ((band(row.priority), row.component, row.issue, row.action) for row in report.recommendations)
        found = table("recommendations", head, rows)
        first: list[Block] = [replace(found, rows=found.rows[:FIRST])]
        if len(found.rows) > FIRST:
            more = replace(found, key="more-recommendations", rows=found.rows[FIRST:])
            first.append(Details(f"{counted(len(more.rows), 'more recommendation')}", (more,)))
        yield Section("recommendations", "Recommendations", tuple(first))


def robustness(found: RobustnessCurve, name: str) -> Section:
    metric, share, shown = metric_name(name), name in SHARES, described(name)
    rows = (
        (
            Cell(f"{row.noise_level:g}", row.noise_level),
            row.error if row.accuracy is None else estimate(row.accuracy, share=share),
            estimate(row.retention, share=True),
            band_of(row),
        )
        for row in found.levels
    )
    points = tuple(
        (row.noise_level, Bar(f"{row.noise_level:g}", estimate(score, share=share), score.low, score.high))
        for row in found.levels
        if (score := row.accuracy) is not None and score.value is not None
    )
    head = ("noise level", shown, f"retention (share of the clean {metric})", "band of the loss")
    blocks: tuple[Block, ...] = (
        Curve("robustness-curve", f"{capitalised(shown)} under noise", "noise level", shown, points),
        folded(table("robustness", head, rows, "Noise levels"), "level"),
    )
    return Section("robustness", f"Robustness (noise on {', '.join(found.operators)})", blocks)


def method(run: Run, *, diverging: bool) -> Section:
    """How numbers were made; of a curve, which shows no divergence, only what concerns losses."""
    cost = run.cost
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    question = run.settings.question
    same = "; every scale and every window gets the same noise draws" if question is None else ""
    score = f"The sensitivity score is the {metric_name(run_metric(run))} lost, divided by the scale of the noise."
    losses = (
        f"Intervals are 95 % and paired by sample{same}. The "
        "intervals of losses hold simultaneously for all rows of a table, so any row may be singled out. The largest "
        "loss is also given corrected for selection: measured on samples that were not used to select it, as its "
        "finding states it. Selection can only inflate the largest loss, so only the lower end of its interval is "
        "corrected. Intervals decide bands, avalanche points and findings; a row whose interval spans two bands is "
        "borderline. p values are corrected for the number of rows in their table (Holm). "
        f"{score if question is None else _no_scale(question)}"
    )
    divergence = (
        f"KL is the divergence of the {'noisy' if question is None else 'rounded'} output from the clean one, in nats "
        "per token. The first number is typical: "
        "the geometric mean of the middle three fifths of the samples. It ranks the rows and ignores the tails. The "
        "mean is taken over all samples, and a few of them can dominate it. Where the tail allows no upper bound, the "
        f"report says 'at least' and gives the lower bound. A KL below {run.kl_floor:.0e} is indistinguishable from 0. "
        "In a row marked nonlinear, injected and predicted KL differ significantly, by more than a factor of two: "
        "trust the injected one."
    )
    spent = (
        f"{cost.trials} trials; this run took {cost.forwards:.1f} passes over the test data and {cost.seconds:.0f} s; "
        f"{run.device}, {run.conditions.dtype}; seeds {', '.join(map(str, run.settings.seeds))}. {versions}. "
        f"{run.finished}."
    )
    explained = [Paragraph(losses, "Losses.")]
    explained += [Paragraph(divergence, "Divergence.")] if diverging else []
    noted = [Paragraph(f"{note}.", "Note:") for note in (*run.model.notes, *run.notes)]
    return Section("method", "Method", (*explained, Paragraph(_asked(run)), Paragraph(spent), *noted))


def _no_scale(question: Question) -> str:
    """What a report on a number format leaves out, and what replaces it."""
    return (
        f"{question.name}: a number format has no scale of noise, so there is no sensitivity score, no critical "
        "threshold and no gradient ratio; an operator is critical where its loss lies in the band CRITICAL. It draws "
        "nothing, so one seed is enough. Predictions project its own rounding errors on gradients: trust their order "
        "more than their size."
    )


def _asked(run: Run) -> str:
    """What was asked, so that a reader can tell one run from another."""
    settings, data = run.settings, run.data
    how = _HOW.get(data.measure, data.measure)
    return (
        f"Effort {settings.effort}; levels {', '.join(settings.levels)}; windows of {settings.window} layers, "
        f"step {settings.step}; metric {metric_name(run_metric(run))}, {how}; n = {data.samples} samples unless a row "
        "says otherwise."
    )


def limits(could_not_see: Iterable[str]) -> Iterable[Section]:
    items = tuple(Paragraph(limit) for limit in could_not_see)
    if items:
        yield Section("limits", "What this run could not see", (Bullets(items),))


# -- the last pages: the two raw risk scores, and the point rules of the original method notes


def risk_scores(report: DiagnosisReport) -> Iterable[Section]:
    """Both scores with their terms: they answer different questions and may differ."""
    found = report.executive_summary
    rows = (
        _risk("report score (from the findings)", found.report_risk),
        _risk("dashboard score (from the metrics)", found.dashboard_risk),
    )
    explained = (
        "The overall risk is the higher of two levels: that of the report score and that of the worst significant "
        "finding. Where there are too few samples to detect a loss that matters, the risk is not measurable, whatever "
        f"the scores say. The dashboard score uses only the point estimate of the loss under {_everywhere(report.run)}."
    )
    scores = folded(table("risk-scores", ("score", "points", "level", "terms"), rows, "Scores"), "score")
    yield Section("risk-scores", "Risk scores", (Paragraph(explained), scores))


def _everywhere(run: Run) -> str:
    question = run.settings.question
    return "noise in all matrix products" if question is None else f"{question.phrase} in all blocks"


def _risk(name: str, risk: Risk) -> tuple[object, ...]:
    terms = [term.reason if term.points is None else f"{term.reason} (+{term.points:g})" for term in risk.terms]
    points = Cell(f"{risk.score:g}", risk.score)
    return name, points, band(risk.level), ", ".join(terms) or "none"


def point_rules(report: DiagnosisReport) -> Iterable[Section]:
    """The labels that point values alone would get."""
    known = ((name, row) for name, row in _rows(report) if row.point_rule is not None)
    rows = [(name, row) for name, row in known if row.degradation is not None and row.degradation.value is not None]
    points = () if report.layer_analysis is None else report.layer_analysis.point_rule_avalanches
    if not rows and not points:
        return
    metric = metric_name(run_metric(report.run))
    explained = (
        "The original method notes label a row by its point value alone. These labels are listed for comparison. They "
        "ignore the intervals, so a label may differ from the band of the same row above; the band is the one that "
        "counts."
    )
    blocks: list[Block] = [Paragraph(explained)]
    if rows:
        head = ("row", f"{metric} lost", "band by point value", "sensitivity score", "score band by point value")
        columns = len(head) if report.run.settings.question is None else 3  # a number format has no score
        body = (_labels(name, row)[:columns] for name, row in rows)
        labels = table("point-rules", head[:columns], body, "Labels by point values")
        blocks.append(folded(labels, "row"))
    if points:
        head = ("layers", f"{metric} lost", "severity", "neighbours", "layers in common")
        body = (
            (
                f"{point.start} to {point.end}",
                Cell(percent(point.degradation), point.degradation),
                band(point.severity),
                ", ".join(map(percent, point.neighbours)),
                f"{point.common[0]} to {point.common[1]}",
            )
            for point in points
        )
        avalanches = table("point-rule-avalanches", head, body, "Avalanche points by point values")
        blocks.append(folded(avalanches, "window"))
    yield Section("point-rules", "Point rules of the original method notes", tuple(blocks))


def _rows(report: DiagnosisReport) -> Iterable[tuple[str, Effect]]:
    if report.operator_analysis is not None:
        yield from report.operator_analysis.items()
    if report.layer_analysis is not None:
        yield from ((f"layers {row.layer_range}", row) for row in report.layer_analysis.windows)
        yield from ((f"layer {row.layer}", row) for row in report.layer_analysis.layers)
        yield from report.layer_analysis.places.items()


def _labels(name: str, row: Effect) -> tuple[object, ...]:
    assert row.point_rule is not None
    value, rule = None if row.degradation is None else row.degradation.value, row.point_rule
    loss = Cell(percent(value), value)
    return name, loss, band(rule.degradation_band), row.sensitivity_score, band(rule.sensitivity_band)
