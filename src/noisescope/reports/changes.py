"""Two runs side by side: what changed, as a document and as plain lines."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from noisescope.reports.document import Bar, Block, Bullets, Cell, Chart, Document, Paragraph, Section, Table
from noisescope.reports.report import Report
from noisescope.reports.words import METRICS, SHARES, Row, estimate, metric_name, number, text

LARGEST = 5  # changes named on the first screen
SURE = 0.05  # the p below which a row by itself would be a change
FEW = 3  # bars; fewer are read off the table
_TONES = {"worse": "critical", "better": "low", "not measurable": "unsure"}


class Comparison(Report):
    """Two runs side by side: reads, prints and saves as a report does."""

    parts = ("comparison",)
    one_of = ()

    def __repr__(self) -> str:
        return f"<Comparison: {self['comparison']['verdict']['word']}>"

    def document(self) -> Document:
        return changes_document(self.data)


def changes_document(report: Row) -> Document:
    """Verdict first, then both runs, the changes, and what was not compared."""
    found = report["comparison"]
    sections = [_verdict(found), _runs(found), *_changes(found), *_left_out(found), _method(found)]
    facts = tuple((name, run_line(found[name.lower()])) for name in ("A", "B"))
    return Document("noisescope: two runs compared", facts, tuple(sections))


# -- plain lines, also for the command line


def run_line(run: Row) -> str:
    """A run in one line."""
    model, data, conditions = run["model"], run["data"], run["conditions"]
    return (
        f"{run['name']}: {model['source']} ({model['architecture']}, {model['blocks']} blocks), {data['source']}, "
        f"{data['samples']} samples, {conditions['dtype']} on {run['device']}"
    )


def verdict_line(found: Row) -> str:
    """ "B is worse than A: 3 of 40 comparisons are surely worse, none better." """
    verdict = found["verdict"]
    word = {
        "worse": "B is worse than A",
        "better": "B is better than A",
        "mixed": "B is worse than A in some respects and better in others",
    }.get(verdict["word"], verdict["word"])
    parts = [
        f"{metric_name(name)}: {count['worse'] or 'none'} worse, {count['better'] or 'none'} better of {count['looks']}"
        for name, count in verdict["metrics"].items()
    ]
    return f"{word}. {'; '.join(parts)}."


def change_line(row: Row) -> str:
    """A row in one line: what it was, what it is, the difference and how sure it is."""
    sides = " -> ".join(_side(row, side).text.partition(" [")[0] for side in ("a", "b"))
    count, how = row["difference"]["n"], "paired" if row["paired"] else "unpaired"
    where = f"{metric_name(row['metric'])}, {row['label']}"
    return f"{where}: {sides}, {change(row).text}, n = {count}, {how}; {judgement(row).text}"


def largest(found: Row) -> list[Row]:
    """The rows to name first: the clean model's, then of every metric the largest sure changes."""
    clean = [row for row in found["rows"] if not row["noise"]]
    noisy = [row for row in found["rows"] if row["noise"] and row["verdict"] != "not measurable"]
    rows = [row for row in noisy if row["verdict"] in ("worse", "better")] or noisy
    metrics = dict.fromkeys(row["metric"] for row in rows)
    room = math.ceil(LARGEST / max(len(metrics), 1))
    return clean + [row for metric in metrics for row in [r for r in rows if r["metric"] == metric][:room]]


# -- cells


def change(row: Row) -> Cell:
    """B less A with its interval. Shares differ by points, never by "%"."""
    found, shown = row["difference"], row["metric"] in SHARES
    if found.get("value") is None:
        return estimate(found)
    factor, unit = (100.0, " points") if shown else (1.0, "")
    low, high = (None if found[end] is None else factor * found[end] for end in ("low", "high"))
    span = "" if low is None and high is None else f" [{_signed(low)}, {_signed(high)}]"
    return Cell(
        f"{_signed(factor * found['value'])}{unit}{span}", float(found["value"]), _TONES.get(row["verdict"], "")
    )


def judgement(row: Row) -> Cell:
    """The verdict of a row; where nothing was seen, what could have been."""
    if row["verdict"] != "no difference seen":
        return Cell(row["verdict"], tone=_TONES.get(row["verdict"], ""))
    smallest = row["smallest_detectable"]
    if smallest is None:
        return Cell("no difference seen (nor could one have been)")
    shown = f"{100 * smallest:.3g} points" if row["metric"] in SHARES else number(smallest)
    if row["p"] < SURE:  # its own interval leaves 0 out, and a reader sees that
        return Cell(f"not sure among so many (p = {row['p']:.2g} alone; smallest detectable {shown})", tone="unsure")
    return Cell(f"no difference seen (smallest detectable {shown})")


def _side(row: Row, side: str) -> Cell:
    return estimate(row[side], share=row["metric"] in SHARES)


def _signed(value: float | None) -> str:
    return "..." if value is None else f"{value:+.3g}"


# -- sections


def _verdict(found: Row) -> Section:
    blocks: list[Block] = [Paragraph(verdict_line(found), "Verdict:")]
    rows = largest(found)
    if rows:
        blocks.append(Bullets(tuple(Paragraph(change_line(row)) for row in rows)))
    blocks += [Paragraph(note, "Note:") for note in found["notes"]]
    return Section("verdict", "Verdict", tuple(blocks))


def _runs(found: Row) -> Section:
    both = found["a"], found["b"]
    facts = {
        "folder": [run["name"] for run in both],
        "model": [run["model"]["source"] for run in both],
        "weights (fingerprint)": [_listed(run["model"]["fingerprint"]) for run in both],
        "data": [f"{run['data']['source']} ({run['data']['samples']} samples)" for run in both],
        "data (fingerprint)": [_listed(run["data"]["fingerprint"]) for run in both],
        "noise": [f"{run['settings']['perturbation']}, seeds {_listed(run['settings']['seeds'])}" for run in both],
        "device": [f"{run['device']}, {run['conditions']['dtype']}" for run in both],
        "trials": [f"{run['trials']} ({run['failed']} failed)" for run in both],
    }
    body = tuple((text(name), text(a), text(b)) for name, (a, b) in facts.items())
    blocks: list[Block] = [Table("runs", ("", "A", "B"), body)]
    if found["differs"]:
        rows = tuple((text(row["what"]), text(_listed(row["a"])), text(_listed(row["b"]))) for row in found["differs"])
        blocks.append(Table("differs", ("what", "A", "B"), rows, "What was asked differently"))
    else:
        blocks.append(Paragraph("Both runs asked the same of the same model."))
    return Section("runs", "The runs", tuple(blocks))


def _changes(found: Row) -> Iterable[Section]:
    """A table for each metric: sure changes first, each part by size."""
    head = ("noise on", "A", "B", "B less A", "verdict", "n", "seeds in common", "paired", "p (corrected)")
    for metric in dict.fromkeys(row["metric"] for row in sorted(found["rows"], key=_metric_order)):
        rows = [row for row in found["rows"] if row["metric"] == metric]
        name = METRICS.get(metric, metric)
        table = Table(f"changes-{metric}", head, tuple(map(_cells, rows)))
        yield Section(f"changes-{metric}", f"Changes: {name}", (*_chart(metric, name, rows), table))


def _cells(row: Row) -> tuple[Cell, ...]:
    n, seeds, p = row["difference"]["n"], row.get("seeds"), row.get("p_corrected")
    common = Cell("") if seeds is None else Cell(str(seeds["common"]), float(seeds["common"]))
    return (
        text(row["label"]), _side(row, "a"), _side(row, "b"), change(row), judgement(row), Cell(str(n), float(n)),
        common, text("yes" if row["paired"] else "no"), Cell("" if p is None else f"{p:.2g}", p),
    )  # fmt: skip


def _chart(metric: str, name: str, rows: list[Row]) -> Iterable[Chart]:
    """Bars along the model, for the noise that most rows have."""
    noises = Counter(row["noise"] for row in rows if row["noise"] and row["difference"]["value"] is not None)
    if not noises or max(noises.values()) < FEW:
        return
    noise = noises.most_common(1)[0][0]
    chosen = sorted((row for row in rows if row["noise"] == noise), key=lambda row: row["order"])
    bars = tuple(
        Bar(row["aim"], change(row), row["difference"]["low"], row["difference"]["high"])
        for row in chosen
        if row["difference"]["value"] is not None
    )
    unit = "difference as a share" if metric in SHARES else "difference"
    yield Chart(f"chart-{metric}", f"B less A {noise}: {name}", unit, bars)


def _left_out(found: Row) -> Iterable[Section]:
    items = [
        Paragraph(f"{', '.join(found[f'only_in_{side}'])}.", f"Only {side.upper()} ran:")
        for side in ("a", "b")
        if found[f"only_in_{side}"]
    ]
    for row in found["failed"]:
        where = "; ".join(f"{side.upper()}: {row[side]}" for side in ("a", "b") if row[side])
        items.append(Paragraph(where, f"Failed, {row['label']}:"))
    if items:
        yield Section("left-out", "Not compared", (Bullets(tuple(items)),))


def _method(found: Row) -> Section:
    looks = found["verdict"]["looks"]
    return Section(
        "method",
        "Method",
        (
            Paragraph(
                "An injection is compared where both runs ran it alike: same operators, places, noise and score. Where "
                "the samples are the same, differences are taken sample by sample, averaged over the seeds both have; "
                "else the means are compared. Intervals are 95 % each; verdicts are by p values corrected for all "
                f"{looks} comparisons (Holm), 5 % in all. The smallest detectable difference would have been found in "
                "four of five such runs."
            ),
        ),
    )


def _listed(value: Any) -> str:
    """A setting in a line; of a fingerprint the first letters."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value[:12] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else str(value)


def _metric_order(row: Row) -> bool:
    return row["metric"] in ("kl", "nll")
