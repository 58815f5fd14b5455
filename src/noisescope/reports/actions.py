"""What to do, as sections: which layers to validate on new hardware, which number format each linear gets."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.reports.document import Block, Cell, Paragraph, Section, Table
from noisescope.reports.words import Row, band, estimate, percent, plain, text

_URGENCY = {1: "HIGH", 2: "MODERATE", 3: "LOW"}
_PLANS = {"plan": "this plan", "bit rule": "bit rule of the original method notes"}


def migration(report: Row) -> Iterable[Section]:
    """Places by priority with the reasons; those of the last priority in one row."""
    plan = report.get("migration_plan")
    if not plan:
        return
    body: list[tuple[Cell, ...]] = []
    for group in plan["priorities"]:
        urgency = Cell(str(group["priority"]), group["priority"], tone=band(_URGENCY[group["priority"]]).tone)
        entries = group["evidence"]
        if group["priority"] == 3 and entries:
            reasons = text(f"no reason to look closer; {group['validation']}")
            body.append((urgency, text(f"the other {len(entries)} places"), text("INT8 or BF16"), reasons))
            continue
        for entry in entries:
            where = f"layer {entry['place']}" if isinstance(entry["place"], int) else entry["place"]
            precision = group["precision"][str(entry["place"])]
            body.append((urgency, text(where), text(precision), text("; ".join(entry["reasons"][:2]))))
    told = [f"Priority {g['priority']}: {g['validation']}." for g in plan["priorities"] if g["priority"] < 3]
    told.append("MAPE is the mean absolute difference in per cent of the reference.")
    blocks: tuple[Block, ...] = (
        Paragraph(" ".join(told), "Moving to new hardware, look here first."),
        Table("migration", ("priority", "place", "precision", "why"), tuple(body)),
        Paragraph("noisescope plan migration, with this report, prints the commands for both machines.", "Next:"),
        *(Paragraph(note) for note in plan["notes"]),
    )
    yield Section("migration", "Hardware migration plan", blocks)


def precision(report: Row) -> Iterable[Section]:
    """A precision plan as it was carried out, beside what else the same bits could buy."""
    plan = report.get("precision_plan")
    if not plan:
        return
    formats = ", ".join(f"{name} for {count}" for name, count in plan["counts"].items())
    bound = plan.get("prediction", {}).get("largest_standard_error")
    error = "" if bound is None else f", standard error at most {bound:.2g}"
    told = (
        f"{plan['average_bits']:.2f} bits a weight on average ({plan['effective_bits']:.2f} with scales): {formats} of "
        f"{len(plan['assignment'])} linears, chosen for the least predicted KL "
        f"({plan['predicted_kl']:.3g} nats{error}). Carried out by rounding the weights, and measured on "
        f"{plan['data']['samples']} samples that scored no format."
    )
    body = [
        (
            text(_PLANS.get(row["name"], row["name"])),
            Cell(f"{row['average_bits']:.2f}", row["average_bits"]),
            plain(row["predicted_kl"]),
            estimate(row["kl"]),
            estimate(row["accuracy"], share=True),
        )
        for row in plan["rows"]
    ]
    blocks: list[Block] = [
        Paragraph(told),
        Table("precision", ("plan", "bits a weight", "KL predicted", "KL measured", "accuracy"), tuple(body)),
    ]
    drawn = plan["random"]
    if drawn["median_kl"]:  # neither without random plans nor where they round nothing
        share = percent(plan["kl"] / drawn["median_kl"])
        blocks.append(
            Paragraph(f"Its KL is {share} of the median of {drawn['n']} random plans with the same average bits.")
        )
    yield Section("precision", "Precision plan", (*blocks, *(Paragraph(note) for note in plan["notes"])))
