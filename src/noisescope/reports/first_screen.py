"""What a reader sees first: how fragile, where, what to do, how certain that is, and what was not covered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from noisescope.diagnosis.report import Run, SettingsFacts
from noisescope.findings import Finding
from noisescope.findings.finding import counted
from noisescope.reports import diagnosis_charts
from noisescope.reports.cell_text import estimate, finding_span, metric_name, ranking_note, run_metric, severity, tone
from noisescope.reports.document import (
    Block,
    Bullets,
    Cell,
    Chart,
    Columns,
    Curve,
    HeatMap,
    Panel,
    Paragraph,
    Section,
    Verdict,
)
from noisescope.reports.next_steps import next_steps
from noisescope.reports.saved_report import DiagnosisReport

MOST_STEPS = 3  # commands on the first screen
MOST_LIMITS = 4


def facts(report: DiagnosisReport) -> Iterator[tuple[str, str]]:
    """Under the title: of what, on what, when, by which version."""
    question = report.run.settings.question
    yield from run_facts(report.run, noise_words(report.run.settings) if question is None else question.name)


def noise_words(settings: SettingsFacts) -> str:
    """ "Gaussian, 5 % of each number"; a perturbation of the caller's own as it prints itself."""
    scale, shown = settings.noise_scale, settings.perturbation
    if scale is None or shown != f"Gaussian(scale={scale!r}, relative_to='element')":
        return shown
    return f"Gaussian, {100 * scale:g} % of each number"


def run_facts(run: Run, noise: str) -> Iterator[tuple[str, str]]:
    yield "Model", f"{run.model.source}: {run.model.architecture}, {run.model.blocks} blocks"
    yield "Data", f"{run.data.source}, {run.data.samples} samples, {run.data.scored_tokens} scored tokens"
    if run.settings.question is not None:
        yield "Number format", noise
    else:
        yield "Noise", f"{noise}, {counted(len(run.settings.seeds), 'seed')}"
    version = run.versions.get("noisescope", "")
    when = run.finished[:16].replace("T", " ")
    yield "Run", f"{when}, noisescope {version}, {run.device}, {run.conditions.dtype}"


def summary(report: DiagnosisReport) -> Iterable[Section]:
    found = report.executive_summary
    level = Cell(found.overall_risk_level, tone=tone(found.overall_risk_level))
    plain = found.in_plain_words
    where: list[Block] = []
    if found.whole_model is not None and not plain.risk:  # which says the same in a sentence
        where.append(finding_line(found.whole_model))
    findings = tuple(map(finding_line, found.top_findings))
    where.append(Bullets(findings, numbered=True) if findings else Paragraph("Nothing stands out."))
    if note := ranking_note(found.top_findings, report.run):
        where.append(Paragraph(note))
    panels = (Panel("Where it is fragile", tuple(where)), *(Panel("", (picture,)) for picture in _picture(report)))
    yield Section(
        "summary",
        "Summary",
        (
            Verdict(level, found.risk_meaning, (plain.risk,) if plain.risk else ()),
            Columns(panels),
            Columns(tuple(panel for panel in (_to_do(report), _certainty(report), _limits(report)) if panel.blocks)),
        ),
    )


def finding_line(finding: Finding) -> Paragraph:
    """A finding with its interval and n, then what else is known of the same place."""
    tag = Cell(severity(finding.severity), tone=tone(finding.severity) or "unsure")
    return Paragraph(
        f"{finding.statement}{finding_span(finding)}", f"{finding.component}:", "; ".join(finding.notes), tag
    )


def _picture(report: DiagnosisReport) -> Iterator[HeatMap | Chart]:
    """The map of layers and operators; without the layer level, the operators."""
    section, metric = report.layer_analysis, metric_name(run_metric(report.run))
    heat = None if section is None else diagnosis_charts.heat_map(section, metric)
    if heat is not None:
        yield heat
    else:
        yield from diagnosis_charts.operator_chart(report)


def in_pictures(report: DiagnosisReport) -> Iterable[Section]:
    """Every other picture, right after the first screen."""
    first = {picture.key for picture in _picture(report)}
    section, metric = report.layer_analysis, metric_name(run_metric(report.run))
    found: list[Chart | Curve] = [
        *diagnosis_charts.operator_chart(report),
        *([] if section is None else diagnosis_charts.window_chart(section, metric)),
        *diagnosis_charts.pareto(report),
        *diagnosis_charts.check_chart(report),
    ]
    panels = tuple(Panel("", (picture,)) for picture in found if picture.key not in first)
    if panels:
        yield Section("pictures", "In pictures", (Columns(panels),))


def _to_do(report: DiagnosisReport) -> Panel:
    steps = tuple(next_steps(report))[:MOST_STEPS]
    command = report.run.command
    cut = () if command is None or not command.cut or not steps else (Paragraph(
        f"Absolute paths are cut to their last part in a report: write out {', '.join(command.cut)}, or run the "
        f"command where they lie."),)  # fmt: skip
    return Panel("What to do", (Paragraph(report.executive_summary.next_step), *steps, *cut))


def _certainty(report: DiagnosisReport) -> Panel:
    """How much was measured, whether the findings were tested, and what a device has to reach."""
    return Panel("How certain this is", (Bullets(tuple(map(Paragraph, _certain(report)))),))


def _certain(report: DiagnosisReport) -> Iterator[str]:
    run, section, check = report.run, report.layer_analysis, report.check
    rounded = run.settings.question is not None  # which draws nothing
    seeds = "" if rounded else f", {counted(len(run.settings.seeds), 'noise seed')}"
    yield f"{run.data.samples} samples with {run.data.scored_tokens} scored tokens{seeds}; intervals are 95 %."
    if section is not None and section.map:
        injected = sum(row.injected for row in section.map)
        others = "the others are predicted" if injected else "all are predicted"
        what = "The format was applied to" if rounded else "Noise was injected into"
        yield f"{what} {injected} of {len(section.map)} cells of the map; {others}."
    if check is not None:
        rows = {row.role: row for row in check.windows if row.degradation is not None}
        if "warned" in rows and "least" in rows:
            warned, least = (estimate(rows[role].degradation, share=True).text for role in ("warned", "least"))
            yield (
                f"Tested on {check.samples} new samples: the same fault costs {warned} where the report warns and "
                f"{least} where it sees the least effect."
            )
    if report.executive_summary.in_plain_words.success:
        yield report.executive_summary.in_plain_words.success


def _limits(report: DiagnosisReport) -> Panel:
    """The last ones say what the run could not detect; the first may be many, and all stand in their own section."""
    limits = report.could_not_see
    left = len(limits) - MOST_LIMITS
    shown = [_sentence(limit) for limit in (limits if left <= 0 else limits[-MOST_LIMITS:])]
    if left > 0:
        shown.append(f"{counted(left, 'more limit')} in the whole report.")
    return Panel("What was not covered", (Bullets(tuple(map(Paragraph, shown))),) if shown else ())


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:].rstrip(".") + "."
