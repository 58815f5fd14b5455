"""What to do, as sections: places to validate on new hardware, a number format for each linear, the check of the
findings under a fault, and what computes wrongly."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.findings.finding import counted
from noisescope.plans.migration import Priority
from noisescope.plans.precision_results import PlanRow, PrecisionPlan
from noisescope.reports.analysis_sections import folded
from noisescope.reports.cell_text import (
    estimate,
    mean,
    metric_name,
    percent,
    run_metric,
    table,
    tone,
)
from noisescope.reports.document import Block, Cell, Paragraph, Section
from noisescope.reports.saved_report import DiagnosisReport
from noisescope.sites import Place

SUSPECTS = 10  # rows of the table of suspects
_URGENCY = {1: "HIGH", 2: "MODERATE", 3: "LOW"}
_KINDS = {"plan": "this plan", "bit rule": "bit rule of the original method notes"}


def migration(report: DiagnosisReport) -> Iterable[Section]:
    """Places by priority with the reasons; those of the last priority in one row."""
    plan = report.migration_plan
    if plan is None:
        return
    rows = (row for group in plan.priorities for row in _places(group))
    asked = [f"Priority {group.priority}: {group.validation}." for group in plan.priorities if group.priority < 3]
    asked.append("MAPE is the mean absolute percentage error relative to the reference.")
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(asked), "Validate these places first on new hardware."),
        folded(table("migration", ("priority", "place", "precision", "why"), rows, "Places by priority"), "row"),
        *(Paragraph(note) for note in plan.notes),
    )
    yield Section("migration", "Hardware migration plan", blocks)


def _places(group: Priority) -> Iterable[tuple[object, ...]]:
    urgency = Cell(str(group.priority), group.priority, tone(_URGENCY[group.priority]))
    if group.priority < 3:
        for one in group.evidence:
            yield urgency, place_name(one.place), group.precision[str(one.place)], "; ".join(one.reasons[:2])
    elif group.evidence:
        precision = " or ".join(dict.fromkeys(group.precision.values()))
        why = f"no finding here; {group.validation}"
        yield urgency, counted(len(group.evidence), "other place"), precision, why


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
        blocks.append(folded(table("precision", head, map(_plan_row, plan.rows), "Plans compared"), "plan"))
    drawn = plan.random
    # Neither without random plans nor where they round nothing.
    if plan.typical_kl is not None and drawn.median_typical_kl:
        share = percent(plan.typical_kl / drawn.median_typical_kl)
        words = f"Its typical KL is {share} of the median over {drawn.n} random plans with the same average bits."
        blocks.append(Paragraph(words))
    notes = [note for note in (plan.note, *plan.notes) if note]
    yield Section("precision", "Precision plan", (*blocks, *map(Paragraph, notes)))


def _planned(plan: PrecisionPlan) -> str:
    formats = ", ".join(f"{name} for {count}" for name, count in plan.counts.items())
    bound = plan.prediction.largest_standard_error
    error = "" if bound is None else f", standard error at most {bound:.2g}"
    held_out = (
        " Not applied and measured yet."
        if plan.data is None
        else f" Measured on {plan.data.samples} held-out samples that were not used to choose formats."
    )
    return (
        f"{plan.average_bits:.2f} bits per weight on average ({plan.effective_bits:.2f} with scales): {formats} of "
        f"{len(plan.assignment)} linears, chosen to minimise the predicted mean KL ({plan.predicted_mean_kl:.3g} nats "
        f"per token{error}).{held_out}"
    )


def _plan_row(row: PlanRow) -> tuple[object, ...]:
    bits, accuracy = Cell(f"{row.average_bits:.2f}", row.average_bits), estimate(row.accuracy, share=True)
    name = _KINDS.get(row.kind, row.name)
    return name, bits, row.predicted_mean_kl, mean(row.kl.mean), row.kl.typical, accuracy


def check(report: DiagnosisReport) -> Iterable[Section]:
    """The same fault where the report warns and where it does not."""
    section = report.check
    if section is None:
        return
    roles = {"warned": "warns here", "least": "least divergence", "between": ""}
    rows = (
        (
            f"{row.start_layer} to {row.end_layer}",
            roles[row.role],
            row.reported_kl,
            row.error or percent(row.baseline_acc),
            estimate(row.noisy_acc_interval, share=True),
            estimate(row.degradation, share=True),
        )
        for row in section.windows
    )
    metric = metric_name(section.windows[0].metric if section.windows else run_metric(report.run))
    explained = (
        f"A fault was simulated on {section.samples} samples that the diagnosis had not seen: one window at a time, "
        f"the output of every {' and '.join(section.operators)} in its layers was rounded to {section.fault}. If the "
        f"report is right, its ranking of the windows (KL injected) agrees with the damage ({metric} lost)."
    )
    head = ("layers", "this report", "KL injected", f"{metric} before", f"{metric} with the fault", f"{metric} lost")
    blocks = (Paragraph(explained), folded(table("check", head, rows, "Windows with the fault"), "window"))
    yield Section("check", "The findings put to the test", blocks)


def locate(report: DiagnosisReport) -> Iterable[Section]:
    """What computes wrongly, if a locator was asked."""
    found = report.locate
    if found is None:
        return
    blocks: list[Block] = []
    if found.simulated is not None:
        what = f"The fault {found.simulated} was injected on purpose; it changed {found.elements_changed} elements."
        blocks.append(Paragraph(what, "Simulated:"))
    verdict = f"{found.headline} ({found.method}, {found.checked} checks, {found.forwards:g} forwards)"
    blocks.append(Paragraph(verdict, "Verdict:"))
    if found.suspects:
        head = ("place", "operator", "module", "kind of fault", "confidence", "evidence")
        rows = (
            (place_name(row.place), row.operator, row.module, row.fault_class,
             Cell(f"{row.confidence:.2f}", row.confidence), row.evidence)
            for row in found.suspects[:SUSPECTS]
        )  # fmt: skip
        blocks.append(folded(table("suspects", head, rows, "Suspects, most likely first"), "suspect"))
        blocks.append(Paragraph("An ulp is a unit in the last place: the spacing of adjacent numbers of a format."))
    if found.unseen:
        unseen = f"{counted(len(found.unseen), 'operator')}, such as {found.unseen[0]}."
        blocks.append(Paragraph(unseen, "Not judged:"))
    yield Section("locate", "What computes wrongly", (*blocks, *map(Paragraph, found.notes)))
