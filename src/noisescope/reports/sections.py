"""From a report to a document: what comes first for a reader, and what stands around the levels."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.reports import actions, levels
from noisescope.reports.document import Bar, Block, Bullets, Cell, Curve, Document, Paragraph, Section, Table, Verdict
from noisescope.reports.words import Row, band, estimate, finding_span, percent, plain, text, tone

_SCORES = {
    "report_risk": "report score, which gives the level (what the diagnosis found)",
    "dashboard_risk": "dashboard score (the metrics)",
}
_PLAIN = {"risk": "What it means", "work": "What is to be done", "success": "How to know that it worked"}


def document_of(report: Row) -> Document:
    """The order a reader needs: verdict, what to do, the evidence, the method, the limits."""
    sections: list[Section] = []
    if "executive_summary" in report:
        evidence = (levels.operators, levels.layers, levels.channels, levels.formats)
        advice = (recommendations, actions.migration, actions.precision, check, locate)
        parts = (summary, *advice, *evidence, levels.metrics, levels.correlations)
        sections += [section for part in parts for section in part(report)]
    if "robustness" in report:
        sections += robustness(report)
    return Document("noisescope report", tuple(facts(report)), (*sections, *method(report), *limits(report)))


def facts(report: Row) -> Iterable[tuple[str, str]]:
    run = report.get("run", {})
    if model := run.get("model"):
        yield "Model", f"{model['source']}: {model['architecture']}, {model['blocks']} blocks"
    if data := run.get("data"):
        yield "Data", f"{data['source']}, {data['samples']} samples, {data['scored_tokens']} scored tokens"
    if settings := run.get("settings"):
        levels_tried = [row["noise_level"] for row in (report.get("robustness") or {}).get("levels", [])]
        noise = (
            f"levels {', '.join(f'{level:g}' for level in levels_tried)}" if levels_tried else settings["perturbation"]
        )
        count = len(settings["seeds"])
        yield "Noise", f"{noise}, {count} seed{'' if count == 1 else 's'}"


def summary(report: Row) -> Iterable[Section]:
    found = report["executive_summary"]
    level, _, meaning = found["overall_risk_level"].partition(" - ")
    blocks: list[Block] = [Verdict(Cell(level, tone=tone(level)), meaning, tuple(_reasons(found)))]
    findings = [
        Paragraph(f"{row['statement']}{finding_span(row)}", f"[{row['severity']}] {row['component']}:")
        for row in found["top_findings"]
    ]
    blocks.append(Bullets(tuple(findings), numbered=True) if findings else Paragraph("Nothing stands out."))
    blocks.append(Paragraph(found["next_step"], "Next step:"))
    yield Section("summary", "Summary", tuple(blocks))
    words = found.get("in_plain_words", {})
    told = [Paragraph(words[key], f"{lead}:") for key, lead in _PLAIN.items() if key in words]
    if told:
        yield Section("plain-words", "In plain words", tuple(told))


def _reasons(found: Row) -> Iterable[str]:
    """Both scores with their terms: they answer different questions and may differ."""
    for name, words in _SCORES.items():
        risk = found[name]
        terms = [
            f"{term['reason']}" + ("" if term["points"] is None else f" (+{term['points']:g})")
            for term in risk["terms"]
        ]
        yield f"{words}: {risk['score']:g}, {risk['level']}; {', '.join(terms) or 'nothing counted'}"


def recommendations(report: Row) -> Iterable[Section]:
    rows = report["recommendations"]
    if rows:
        body = tuple(
            (band(row["priority"]), text(row["component"]), text(row["issue"]), text(row["action"])) for row in rows
        )
        table = Table("recommendations", ("priority", "component", "issue", "action"), body)
        yield Section("recommendations", "Recommendations", (table,))


def check(report: Row) -> Iterable[Section]:
    """The same fault where the report warns and where it does not."""
    section = report.get("check")
    if not section:
        return
    roles = {"warned": "warns of these", "least": "they diverge least", "between": ""}
    body = tuple(
        (
            text(f"{row['start_layer']} to {row['end_layer']}"),
            text(roles[row["role"]]),
            plain(row["reported_kl"]),
            text(percent(row["baseline_acc"])) if "baseline_acc" in row else text(row["error"]),
            estimate(row.get("noisy_acc_interval"), share=True),
            estimate(row.get("degradation"), share=True),
        )
        for row in section["windows"]
    )
    told = (
        f"A simulated fault on {section['samples']} problems that the diagnosis has not seen: the output of every "
        f"{' and '.join(section['operators'])} of these layers, one window at a time, is rounded to "
        f"{section['fault']}. A good report ranks the windows (KL injected) as the fault does (accuracy lost)."
    )
    head = ("layers", "this report", "KL injected", "accuracy before", "accuracy with the fault", "accuracy lost")
    yield Section("check", "The findings put to the test", (Paragraph(told), Table("check", head, body)))


def locate(report: Row) -> Iterable[Section]:
    """What computes wrongly, if a locator was asked."""
    found = report.get("locate")
    if not found:
        return
    blocks: list[Block] = []
    if "simulated" in found:
        told = f"The fault {found['simulated']} was put in; it changed {found['elements_changed']} elements."
        blocks.append(Paragraph(told, "Simulated:"))
    what = f"{found['verdict']} ({found['method']}, {found['checked']} checks, {found['forwards']:g} forwards)"
    blocks.append(Paragraph(what, "Verdict:"))
    body = tuple(
        (
            text(row["place"]),
            text(row["operator"]),
            text(row["module"]),
            text(row["fault_class"]),
            Cell(f"{row['confidence']:.2f}", row["confidence"]),
            text(row["evidence"]),
        )
        for row in found["suspects"][: levels.WORST]
    )
    if body:
        head = ("place", "operator", "module", "kind of fault", "confidence", "evidence")
        blocks.append(Table("suspects", head, body, "Suspects, the likeliest first"))
        blocks.append(Paragraph("An ulp is a unit in the last place of a number: the finest step that its format has."))
    if found["unseen"]:
        blocks.append(Paragraph(f"{len(found['unseen'])} operators, such as {found['unseen'][0]}.", "Not judged:"))
    blocks += [Paragraph(note) for note in found["notes"]]
    yield Section("locate", "What computes wrongly", tuple(blocks))


def robustness(report: Row) -> Iterable[Section]:
    section = report["robustness"]
    body = tuple(
        (
            Cell(f"{row['noise_level']:g}", row["noise_level"]),
            estimate(row["accuracy"], share=True) if row["accuracy"] else text(row.get("error", "")),
            estimate(row.get("retention"), share=True),
            band(row.get("band")),
        )
        for row in section["levels"]
    )
    known = [row for row in section["levels"] if (row["accuracy"] or {}).get("value") is not None]
    points = tuple((row["noise_level"], _point(row)) for row in known)
    head = ("noise level", "accuracy", "retention (share of the clean accuracy)", "band of the loss")
    blocks: tuple[Block, ...] = (
        Curve("robustness-curve", "Accuracy under noise", "noise level", "accuracy", points),
        Table("robustness", head, body),
    )
    yield Section("robustness", f"Robustness (noise on {', '.join(section['operators'])})", blocks)


def _point(row: Row) -> Bar:
    accuracy = row["accuracy"]
    return Bar(f"{row['noise_level']:g}", estimate(accuracy, share=True), accuracy.get("low"), accuracy.get("high"))


def method(report: Row) -> Iterable[Section]:
    run = report.get("run", {})
    if not run:
        return
    cost = run["cost"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield Section(
        "method",
        "Method",
        (
            Paragraph(
                "Intervals are 95 %, paired on samples, with the same noise draws at every scale and in every window; "
                "p values of rows looked at together are corrected (Holm). KL is of the noisy output from the clean "
                f"one, per token, in nats; below {run.get('kl_floor', 0):.0e} it can't be told from 0. Scores are the "
                "accuracy lost over the scale of the noise. In a row marked parted, injection and prediction surely "
                "differ by more than a factor of two: believe the injection."
            ),
            Paragraph(_asked(run)),
            Paragraph(
                f"{cost['trials']} trials; now {cost['forwards']:.1f} forwards of the test data, "
                f"{cost['seconds']:.0f} s; {run['device']}, {run['conditions']['dtype']}; seeds "
                f"{', '.join(map(str, run['settings']['seeds']))}. {versions}. {run['finished']}."
            ),
        ),
    )


def _asked(run: Row) -> str:
    """What was asked, so that a reader can tell one run from another."""
    settings, data = run["settings"], run["data"]
    how = {"score": "teacher-forced", "generate": "by generation", "custom": "by the caller's own metric"}
    return (
        f"Effort {settings['effort']}; levels {', '.join(settings['levels'])}; windows of {settings['window']} layers, "
        f"step {settings['step']}; metric {run['metric']}, {how.get(data.get('measure'), data.get('measure'))}; "
        f"n = {data['samples']} samples in every row that does not say otherwise."
    )


def limits(report: Row) -> Iterable[Section]:
    items = tuple(Paragraph(limit) for limit in report["could_not_see"])
    if items:
        yield Section("limits", "What this run could not see", (Bullets(items),))
