"""What changed between two runs, and a store's gates over time: as documents, and as plain lines."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

from noisescope.diagnosis.change_rows import (
    LOWER_IS_BETTER,
    UNCHANGED,
    AskedDifferently,
    ChangeRow,
    ComparedRuns,
    RunChanges,
    RunFacts,
)
from noisescope.diagnosis.rows import SIGNIFICANT
from noisescope.findings import finding
from noisescope.jsonform import Json
from noisescope.plans.gate_rows import GateResult
from noisescope.reports.cell_text import SHARES, cell, described, estimate, metric_name, number, percent, table
from noisescope.reports.document import Bar, Block, Bullets, Cell, Chart, Curve, Document, Paragraph, Section
from noisescope.reports.saved_report import SavedReport
from noisescope.stats import Estimate
from noisescope.tables import Sheet, Table

LONGEST = 40  # characters of a setting in a line
LARGEST = 5  # changes named on the first screen
FEW = 3  # bars; fewer are read off the table
_TONES = {"worse": "critical", "better": "low", "not measurable": "unsure"}
_WORDS = {
    "worse": "B is worse than A",
    "better": "B is better than A",
    "mixed": "B is worse than A in some respects and better in others",
}


class Comparison(SavedReport[ComparedRuns]):
    """Two runs side by side: reads, prints and saves as a report does."""

    kinds: ClassVar = {"comparison": ComparedRuns}
    command: ClassVar[str] = "noisescope runs compare"

    def __repr__(self) -> str:
        return f"<Comparison: {self.changes.verdict.word}>"

    @property
    def changes(self) -> RunChanges:
        return self.value.comparison

    def document(self) -> Document:
        """Verdict first, then both runs, the changes, and what was not compared."""
        found = self.changes
        sections = (_verdict(found), _runs(found), *_changes(found.rows), *_left_out(found), _method(found))
        facts = (("A", run_line(found.a)), ("B", run_line(found.b)))
        return Document("noisescope: two runs compared", facts, sections)

    def sheet(self) -> Sheet:
        found = self.changes
        heads = {"label": "noise in", "metric": "metric", "a": "A", "b": "B", "difference": "B less A"}
        lines = (f"A: {run_line(found.a)}", f"B: {run_line(found.b)}", *found.notes)
        tables = {"changes": Table.of(ChangeRow, found.rows)}
        shown = Table.of(ChangeRow, largest_changes(found.rows))
        tone = {"worse": "critical", "better": "low", "mixed": "high"}.get(found.verdict.word, "")
        return Sheet(verdict_line(found), tables, heads | {"verdict": "verdict"}, lines, shown, tone)


# -- plain lines, also for the command line


def run_line(run: RunFacts) -> str:
    """A run in one line."""
    return (
        f"{run.name}: {run.model.source} ({run.model.architecture}, {run.model.blocks} blocks), {run.data.source}, "
        f"{run.data.samples} samples, {run.conditions.dtype} on {run.device}"
    )


def verdict_line(found: RunChanges) -> str:
    """ "B is worse than A. accuracy: 3 worse, none better of 40." What could not be measured is counted, too."""
    verdict = found.verdict
    parts = []
    for name, count in verdict.metrics.items():
        undecided = f", {count.undecided} undecided" if count.undecided else ""
        parts.append(
            f"{metric_name(name)}: {count.worse or 'none'} significantly worse, {count.better or 'none'} better"
            f"{undecided} of {count.comparisons}"
        )
    power = "" if verdict.worse or verdict.better else _power(found.rows)
    return f"{_WORDS.get(verdict.word, verdict.word)}. {'; '.join(parts)}.{power}"


def _power(rows: Sequence[ChangeRow]) -> str:
    """What could have been found, metric by metric."""
    parts = []
    for metric in dict.fromkeys(row.metric for row in rows):
        sizes = [
            row.smallest_detectable for row in rows if row.metric == metric and row.smallest_detectable is not None
        ]
        if sizes:
            span = " to ".join(dict.fromkeys(_size(metric, size) for size in (min(sizes), max(sizes))))
            parts.append(f"{metric_name(metric)} {span}")
    return f" Smallest detectable difference: {'; '.join(parts)}." if parts else ""


def change_line(row: ChangeRow) -> str:
    """A row in one line: what it was, what it is, the difference and how certain it is."""
    sides = " -> ".join(_side(row, side).shown for side in (row.a, row.b))
    how = "paired" if row.paired else "unpaired"
    where = f"{metric_name(row.metric)}, {row.label}"
    return f"{where}: {sides}, {change(row).text}, n = {row.difference.n}, {how}; {judgement(row).text}"


def largest_changes(rows: Sequence[ChangeRow]) -> list[ChangeRow]:
    """The rows to name first: the clean model's, then of every metric the largest significant changes."""
    clean = [row for row in rows if row.clean]
    noisy = [row for row in rows if not row.clean and row.verdict != "not measurable"]
    chosen = [row for row in noisy if row.changed] or noisy
    metrics = dict.fromkeys(row.metric for row in chosen)
    room = math.ceil(LARGEST / max(len(metrics), 1))
    return clean + [row for metric in metrics for row in [r for r in chosen if r.metric == metric][:room]]


# -- cells


def change(row: ChangeRow) -> Cell:
    """B less A with its interval. Shares differ by points, never by "%"."""
    found = row.difference
    if found.value is None:
        return estimate(found)
    factor, unit = (100.0, " points") if row.metric in SHARES else (1.0, "")
    span = "" if found.low is None and found.high is None else finding.span(found, "+.3g", factor)
    return Cell(f"{factor * found.value:+.3g}{unit}", found.value, _TONES.get(row.verdict, ""), interval=span)


def judgement(row: ChangeRow) -> Cell:
    """The verdict of a row; where no difference was found, what could have been."""
    if row.verdict != UNCHANGED:
        return Cell(row.verdict, tone=_TONES.get(row.verdict, ""))
    if row.identical:
        return Cell("identical on every sample")
    if row.smallest_detectable is None:
        return Cell(f"{UNCHANGED} (none could have been detected)")
    size = _size(row.metric, row.smallest_detectable)
    if row.p is not None and row.p < SIGNIFICANT:  # its own interval leaves 0 out, and a reader sees that
        return Cell(
            f"not significant after correction (p = {row.p:.2g} alone; smallest detectable {size})", tone="unsure"
        )
    return Cell(f"{UNCHANGED} (smallest detectable {size})")


def _size(metric: str, value: float) -> str:
    return f"{100 * value:.3g} points" if metric in SHARES else number(value)


def _side(row: ChangeRow, found: Estimate) -> Cell:
    return estimate(found, share=row.metric in SHARES)


# -- sections


def _verdict(found: RunChanges) -> Section:
    blocks: list[Block] = [Paragraph(verdict_line(found), "Verdict:")]
    rows = largest_changes(found.rows)
    if rows:
        blocks.append(Bullets(tuple(Paragraph(change_line(row)) for row in rows)))
    blocks += [Paragraph(note, "Note:") for note in found.notes]
    return Section("verdict", "Verdict", tuple(blocks))


def _runs(found: RunChanges) -> Section:
    both = found.a, found.b
    facts = {
        "folder": [run.name for run in both],
        "model": [run.model.source for run in both],
        "weights (fingerprint)": [_listed(run.model.fingerprint) for run in both],
        "data": [f"{run.data.source} ({run.data.samples} samples)" for run in both],
        "data (fingerprint)": [_listed(run.data.fingerprint) for run in both],
        "noise": [f"{run.settings.perturbation}, seeds {', '.join(map(str, run.settings.seeds))}" for run in both],
        "device": [f"{run.device}, {run.conditions.dtype}" for run in both],
        "trials": [f"{run.trials} ({run.failed} failed)" for run in both],
    }
    blocks: list[Block] = [table("runs", ("", "A", "B"), ((name, *sides) for name, sides in facts.items()))]
    if found.differs:
        rows = ((row.what, _listed(row.a), _listed(row.b)) for row in found.differs)
        blocks.append(table("differs", ("what", "A", "B"), rows, "What was asked differently"))
    else:
        blocks.append(Paragraph("Both runs asked the same of the same model."))
    return Section("runs", "The runs", tuple(blocks))


def _changes(rows: Sequence[ChangeRow]) -> Iterable[Section]:
    """A table for each metric: significant changes first, each part by size."""
    head = ("noise on", "A", "B", "B less A", "verdict", "n", "seeds in common", "paired", "p (corrected)")
    for metric in dict.fromkeys(row.metric for row in sorted(rows, key=lambda row: row.metric in LOWER_IS_BETTER)):
        own = [row for row in rows if row.metric == metric]
        name = described(metric)
        medians = "Medians over samples, and the median of the differences: a few samples decide the mean of a KL"
        caption = "" if own[0].statistic == "mean" else medians
        changes = table(f"changes-{metric}", head, map(_cells, own), caption)
        yield Section(f"changes-{metric}", f"Changes: {name}", (*_chart(metric, name, own), changes))


def _cells(row: ChangeRow) -> tuple[object, ...]:
    p = row.p_corrected
    return (
        row.label, _side(row, row.a), _side(row, row.b), change(row), judgement(row), row.difference.n,
        row.seeds and row.seeds.common, "yes" if row.paired else "no", Cell("" if p is None else f"{p:.2g}", p),
    )  # fmt: skip


def _chart(metric: str, name: str, rows: Sequence[ChangeRow]) -> Iterable[Chart]:
    """Bars along the model, for the noise that most rows have."""
    known = [row for row in rows if not row.clean and row.difference.value is not None]
    noises = Counter(row.noise for row in known)
    if not noises or max(noises.values()) < FEW:
        return
    noise = noises.most_common(1)[0][0]
    chosen = sorted((row for row in known if row.noise == noise), key=lambda row: row.order)
    bars = tuple(Bar(row.target, change(row), row.difference.low, row.difference.high) for row in chosen)
    unit = "difference as a share" if metric in SHARES else "difference"
    yield Chart(f"chart-{metric}", f"B less A {noise}: {name}", unit, bars)


def _left_out(found: RunChanges) -> Iterable[Section]:
    items = [
        Paragraph(f"{', '.join(labels)}.", f"Only {side} ran:")
        for side, labels in (("A", found.only_in_a), ("B", found.only_in_b))
        if labels
    ]
    for row in found.failed:
        where = "; ".join(f"{side}: {error}" for side, error in (("A", row.a), ("B", row.b)) if error)
        items.append(Paragraph(where, f"Failed, {row.label}:"))
    if items:
        yield Section("left-out", "Not compared", (Bullets(tuple(items)),))


def _method(found: RunChanges) -> Section:
    explained = (
        "An injection is compared where both runs ran it alike: same operators, places, noise and score. Where "
        "the samples are the same, differences are taken sample by sample, averaged over the seeds both have; "
        "else the two means or medians are compared. Intervals are 95 % each; verdicts are by p values "
        f"corrected for all {found.verdict.comparisons} comparisons (Holm), 5 % in all. The smallest "
        "detectable difference would have been found in four of five such runs."
    )
    return Section("method", "Method", (Paragraph(explained),))


def differing(row: AskedDifferently) -> str:
    """ "settings.noise_scale (A 0.05, B 0.1)"; the name alone of what is long."""
    a, b = _listed(row.a), _listed(row.b)
    return row.what if max(len(a), len(b)) > LONGEST else f"{row.what} (A {a}, B {b})"


def _listed(value: Json) -> str:
    """A setting in a line; of a fingerprint the first letters."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value[:12] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else str(value)


# -- gates over time


HEAD = ("gate", "step", "finished", "verdict", "worst row", "divergence over the baseline's", "score lost under noise")


def trend(history: Sequence[GateResult]) -> Document:
    """A document of a store's gates, the oldest first: at their steps where all have one, else at their numbers."""
    steps = [gate.step for gate in history if gate.step is not None]
    numbered = len(steps) < len(history)
    places = [float(at) for at in (range(1, len(history) + 1) if numbered else steps)]
    across, last = "gate" if numbered else "step", history[-1] if history else None
    # Drawn without intervals: those of a gate hold for all its rows together, a chart's are 95 % each.
    ratios = tuple((at, Bar("", cell(gate.worst.ratio.value))) for at, gate in zip(places, history, strict=True))
    losses = tuple((at, Bar("", cell(gate.max_degradation))) for at, gate in zip(places, history, strict=True))
    rows = (
        (str(number), gate.step, gate.finished, gate.headline, gate.worst.name, gate.worst.ratio,
         percent(gate.max_degradation))
        for number, gate in enumerate(history, 1)
    )  # fmt: skip
    blocks = (
        Curve("gate-divergence", "Divergence under noise over the baseline's, the worst row", across, "ratio", ratios,
              None if last is None else last.worse_than),
        Curve("gate-degradation", "Score lost under noise, the largest", across, "share of the clean score", losses,
              None if last is None else last.max_degradation_allowed),
        table("gates", HEAD, rows),
    )  # fmt: skip
    return Document("noisescope: gates over time", (), (Section("trend", "Gates over time", blocks),))
