"""What to do, as sections: which layers to validate on new hardware, which number format each linear gets, whether the
findings held under a fault, and what computes wrongly."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.plans.migration import Priority
from noisescope.plans.precision_results import PlanRow, PrecisionPlan
from noisescope.reports.document import Block, Cell, Paragraph, Section, Table
from noisescope.reports.values import DiagnosisReport, LocatedSuspect
from noisescope.reports.words import band, counted_noun, estimate, mean, metric_name, percent, plain, run_metric, text
from noisescope.sites import Place

SUSPECTS = 10  # rows of the table of suspects
_URGENCY = {1: "HIGH", 2: "MODERATE", 3: "LOW"}
_KINDS = {"plan": "this plan", "bit rule": "bit rule of the original method notes"}


def migration(report: DiagnosisReport) -> Iterable[Section]:
    """Places by priority with the reasons; those of the last priority in one row."""
    plan = report.migration_plan
    if plan is None:
        return
    body = tuple(row for group in plan.priorities for row in _places(group))
    asked = [f"Priority {group.priority}: {group.validation}." for group in plan.priorities if group.priority < 3]
    asked.append("MAPE is the mean absolute difference in per cent of the reference.")
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(asked), "On new hardware, validate these places first."),
        Table("migration", ("priority", "place", "precision", "why"), body),
        Paragraph("noisescope plan migration, with this report, prints the commands for both machines.", "Next:"),
        *(Paragraph(note) for note in plan.notes),
    )
    yield Section("migration", "Hardware migration plan", blocks)


def _places(group: Priority) -> Iterable[tuple[Cell, ...]]:
    urgency = Cell(str(group.priority), group.priority, band(_URGENCY[group.priority]).tone)
    if group.priority == 3:
        if group.evidence:
            named = counted_noun(len(group.evidence), "other place")
            precision = " or ".join(dict.fromkeys(group.precision.values()))
            yield urgency, text(named), text(precision), text(f"no reason for more; {group.validation}")
        return
    for entry in group.evidence:
        precision = group.precision[str(entry.place)]
        yield urgency, text(place_name(entry.place)), text(precision), text("; ".join(entry.reasons[:2]))


def place_name(place: Place) -> str:
    return f"layer {place}" if isinstance(place, int) else place


def precision(report: DiagnosisReport) -> Iterable[Section]:
    """A precision plan as it was carried out, beside what else the same bits could buy."""
    plan = report.precision_plan
    if plan is None:
        return
    blocks: list[Block] = [Paragraph(_planned(plan))]
    if plan.rows:
        head = ("plan", "bits per weight", "mean KL predicted", "mean KL measured", "typical KL measured", "accuracy")
        blocks.append(Table("precision", head, tuple(map(_plan_row, plan.rows))))
    drawn = plan.random
    if (
        plan.typical_kl is not None and drawn.median_typical_kl
    ):  # neither without random plans nor where they round nothing
        share = percent(plan.typical_kl / drawn.median_typical_kl)
        words = f"Its typical KL is {share} of the median of {drawn.n} random plans with the same average bits."
        blocks.append(Paragraph(words))
    notes = [note for note in (plan.note, *plan.notes) if note]
    yield Section("precision", "Precision plan", (*blocks, *map(Paragraph, notes)))


def _planned(plan: PrecisionPlan) -> str:
    formats = ", ".join(f"{name} for {count}" for name, count in plan.counts.items())
    bound = plan.prediction.largest_standard_error
    error = "" if bound is None else f", standard error at most {bound:.2g}"
    held_out = (
        " Not carried out yet."
        if plan.data is None
        else f" Measured on {plan.data.samples} held-out samples that were not used to choose formats."
    )
    return (
        f"{plan.average_bits:.2f} bits per weight on average ({plan.effective_bits:.2f} with scales): {formats} of "
        f"{len(plan.assignment)} linears, chosen for the least predicted mean KL ({plan.predicted_mean_kl:.3g} nats "
        f"per token{error}).{held_out}"
    )


def _plan_row(row: PlanRow) -> tuple[Cell, ...]:
    return (
        text(_KINDS.get(row.kind, row.name)),
        Cell(f"{row.average_bits:.2f}", row.average_bits),
        plain(row.predicted_mean_kl),
        mean(row.kl.mean),
        estimate(row.kl.typical),
        estimate(row.accuracy, share=True),
    )


def check(report: DiagnosisReport) -> Iterable[Section]:
    """The same fault where the report warns and where it does not."""
    section = report.check
    if section is None:
        return
    roles = {"warned": "warns of these", "least": "they diverge least", "between": ""}
    body = tuple(
        (
            text(f"{row.start_layer} to {row.end_layer}"),
            text(roles[row.role]),
            plain(row.reported_kl),
            text(row.error or percent(row.baseline_acc)),
            estimate(row.noisy_acc_interval, share=True),
            estimate(row.degradation, share=True),
        )
        for row in section.windows
    )
    metric = metric_name(section.windows[0].metric if section.windows else run_metric(report.run))
    explained = (
        f"A simulated fault on {section.samples} samples that the diagnosis has not seen: the output of every "
        f"{' and '.join(section.operators)} of these layers, one window at a time, is rounded to {section.fault}. A "
        f"good report ranks the windows (KL injected) as the fault does ({metric} lost)."
    )
    head = ("layers", "this report", "KL injected", f"{metric} before", f"{metric} with the fault", f"{metric} lost")
    yield Section("check", "The findings put to the test", (Paragraph(explained), Table("check", head, body)))


def locate(report: DiagnosisReport) -> Iterable[Section]:
    """What computes wrongly, if a locator was asked."""
    found = report.locate
    if found is None:
        return
    blocks: list[Block] = []
    if found.simulated is not None:
        what = f"The fault {found.simulated} was put in; it changed {found.elements_changed} elements."
        blocks.append(Paragraph(what, "Simulated:"))
    verdict = f"{found.verdict} ({found.method}, {found.checked} checks, {found.forwards:g} forwards)"
    blocks.append(Paragraph(verdict, "Verdict:"))
    if found.suspects:
        head = ("place", "operator", "module", "kind of fault", "confidence", "evidence")
        body = tuple(map(_suspect, found.suspects[:SUSPECTS]))
        blocks.append(Table("suspects", head, body, "Suspects, the likeliest first"))
        blocks.append(Paragraph("An ulp is a unit in the last place of a number: the finest step that its format has."))
    if found.unseen:
        unseen = f"{counted_noun(len(found.unseen), 'operator')}, such as {found.unseen[0]}."
        blocks.append(Paragraph(unseen, "Not judged:"))
    yield Section("locate", "What computes wrongly", (*blocks, *map(Paragraph, found.notes)))


def _suspect(row: LocatedSuspect) -> tuple[Cell, ...]:
    return (
        text(place_name(row.place)),
        text(row.operator),
        text(row.module),
        text(row.fault_class),
        Cell(f"{row.confidence:.2f}", row.confidence),
        text(row.evidence),
    )
