"""From a report to a document: what comes first for a reader, and what stands around the levels."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.comparison.roundoff import Roundoff
from noisescope.diagnosis.report import Robustness, RobustnessCurve, Run
from noisescope.diagnosis.rows import Effect
from noisescope.findings import Finding, Risk
from noisescope.findings.finding import counted
from noisescope.reports import analysis_sections as analysis
from noisescope.reports import plan_sections as plans
from noisescope.reports.document import Bar, Block, Bullets, Cell, Curve, Document, Paragraph, Section, Verdict
from noisescope.reports.report_file import TITLE, DiagnosisReport
from noisescope.reports.roundoff_sections import roundoff_sections
from noisescope.reports.words import (
    SHARES,
    band,
    band_of,
    capitalised,
    described,
    estimate,
    finding_span,
    metric_name,
    percent,
    run_metric,
    table,
    tone,
)

_HOW = {"score": "teacher-forced", "generate": "by generation", "custom": "by the caller's own metric"}


def document_of(report: DiagnosisReport | Robustness | Roundoff) -> Document:
    """The order a reader needs: verdict, what to do, the evidence, the method, the limits."""
    if isinstance(report, Roundoff):
        sections = [*roundoff_sections(report), *limits(report.could_not_see)]
        return Document(TITLE, tuple(facts(report.run, "round-off")), tuple(sections), report.run.finished)
    if isinstance(report, Robustness):
        noise = f"levels {', '.join(f'{row.noise_level:g}' for row in report.robustness.levels)}"
        sections = [robustness(report.robustness, run_metric(report.run))]
    else:
        noise = report.run.settings.perturbation
        advice = (recommendations, plans.migration, plans.precision, plans.check, plans.locate)
        evidence = (analysis.operators, analysis.layers, analysis.channels, analysis.formats, analysis.metrics)
        last = (analysis.correlations, risk_scores, point_rules)
        sections = [section for part in (summary, *advice, *evidence, *last) for section in part(report)]
    diverging = isinstance(report, DiagnosisReport)
    sections += [method(report.run, diverging=diverging), *limits(report.could_not_see)]
    return Document(TITLE, tuple(facts(report.run, noise)), tuple(sections), report.run.finished)


def facts(run: Run, noise: str) -> Iterable[tuple[str, str]]:
    yield "Model", f"{run.model.source}: {run.model.architecture}, {run.model.blocks} blocks"
    yield "Data", f"{run.data.source}, {run.data.samples} samples, {run.data.scored_tokens} scored tokens"
    yield "Noise", f"{noise}, {counted(len(run.settings.seeds), 'seed')}"


def summary(report: DiagnosisReport) -> Iterable[Section]:
    found = report.executive_summary
    level = Cell(found.overall_risk_level, tone=tone(found.overall_risk_level))
    blocks: list[Block] = [Verdict(level, found.risk_meaning, ())]
    if found.whole_model is not None:
        blocks.append(finding_line(found.whole_model))
    findings = tuple(map(finding_line, found.top_findings))
    blocks.append(Bullets(findings, numbered=True) if findings else Paragraph("Nothing stands out."))
    blocks.append(Paragraph(found.next_step, "Next step:"))
    yield Section("summary", "Summary", tuple(blocks))
    plain = found.in_plain_words
    leads = {"What it means": plain.risk, "What to do": plain.work, "How to know that it worked": plain.success}
    paragraphs = tuple(Paragraph(words, f"{lead}:") for lead, words in leads.items() if words)
    if paragraphs:
        yield Section("plain-words", "In plain words", paragraphs)


def finding_line(finding: Finding) -> Paragraph:
    """A finding with its interval and n, then what else is known of the same place."""
    notes = "".join(f"; {note}" for note in finding.notes)
    return Paragraph(f"{finding.statement}{finding_span(finding)}{notes}", f"[{finding.severity}] {finding.component}:")


def recommendations(report: DiagnosisReport) -> Iterable[Section]:
    if report.recommendations:
        head = ("priority", "component", "issue", "action")
        rows = ((band(row.priority), row.component, row.issue, row.action) for row in report.recommendations)
        yield Section("recommendations", "Recommendations", (table("recommendations", head, rows),))


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
        table("robustness", head, rows),
    )
    return Section("robustness", f"Robustness (noise on {', '.join(found.operators)})", blocks)


def method(run: Run, *, diverging: bool) -> Section:
    """How numbers were made; of a curve, which shows no divergence, only what concerns losses."""
    cost = run.cost
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    losses = (
        "Intervals are 95 %, paired on samples, with the same noise draws at every scale and in every window. Those of "
        "losses hold for all rows of a table together, so that any row may be picked; the largest is also given "
        "corrected for selection, by its size on other samples than it was picked on, which is the size that its "
        "finding states; only the lower end of its interval is corrected, since picking the largest can only inflate. "
        "Bands, avalanche points and findings are decided by these intervals; a row whose interval "
        "reaches from one band into another is borderline. p values of rows that are looked at together are corrected "
        f"(Holm). The sensitivity score is the {metric_name(run_metric(run))} lost over the scale of the noise."
    )
    divergence = (
        "KL is the divergence of the noisy output from the clean one, in nats per token. The first number is that of a "
        "typical sample, the geometric mean of the middle three fifths: it ranks the rows, and no tail moves it. The "
        "mean is the average over samples, which a few of them can decide: where the tail allows no upper end, only "
        f"'at least' is given, a bound that holds for any data. Below {run.kl_floor:.0e} a KL can't be distinguished "
        "from 0. In a row marked nonlinear, injection and prediction differ significantly by more than a factor of "
        "two: trust the injection."
    )
    spent = (
        f"{cost.trials} trials; this run took {cost.forwards:.1f} forwards of the test data and {cost.seconds:.0f} s; "
        f"{run.device}, {run.conditions.dtype}; seeds {', '.join(map(str, run.settings.seeds))}. {versions}. "
        f"{run.finished}."
    )
    explained = [Paragraph(losses, "Losses.")]
    explained += [Paragraph(divergence, "Divergence.")] if diverging else []
    return Section("method", "Method", (*explained, Paragraph(_asked(run)), Paragraph(spent)))


def _asked(run: Run) -> str:
    """What was asked, so that a reader can tell one run from another."""
    settings, data = run.settings, run.data
    how = _HOW.get(data.measure, data.measure)
    return (
        f"Effort {settings.effort}; levels {', '.join(settings.levels)}; windows of {settings.window} layers, "
        f"step {settings.step}; metric {metric_name(run_metric(run))}, {how}; n = {data.samples} samples in every row "
        "that does not say otherwise."
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
        _risk("report score (what the diagnosis found)", found.report_risk),
        _risk("dashboard score (the metrics)", found.dashboard_risk),
    )
    explained = (
        "The risk of this report is the higher of the report score's level and its worst significant finding; with too "
        "few samples to detect a loss that matters it is not measurable, whatever the scores say. The dashboard score "
        "looks at the point value of the loss under noise in all products alone."
    )
    scores = table("risk-scores", ("score", "points", "level", "made of"), rows)
    yield Section("risk-scores", "Risk scores", (Paragraph(explained), scores))


def _risk(name: str, risk: Risk) -> tuple[object, ...]:
    terms = [term.reason if term.points is None else f"{term.reason} (+{term.points:g})" for term in risk.terms]
    points = Cell(f"{risk.score:g}", risk.score)
    return name, points, band(risk.level), ", ".join(terms) or "nothing counted"


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
        blocks.append(table("point-rules", head, (_labels(name, row) for name, row in rows)))
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
        blocks.append(table("point-rule-avalanches", head, body, "Avalanche points by point values"))
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
