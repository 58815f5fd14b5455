"""Values as the cells of a report: the one place where its numbers are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from noisescope import findings
from noisescope.diagnosis.format_question import Words
from noisescope.diagnosis.report import Run
from noisescope.diagnosis.rows import Divergence, Effect
from noisescope.diagnosis.section_types import Threshold
from noisescope.findings import Finding
from noisescope.findings import metric_name as metric_name
from noisescope.findings.finding import NOT_RATED, Severity
from noisescope.reports.document import TONES, Cell, Table
from noisescope.stats import SELECTED, Correlation, Estimate

_TONES = {
    "CRITICAL": "critical", "AVALANCHE": "critical", "HIGH": "high", "POOR": "high", "MODERATE": "moderate",
    "MEDIUM": "moderate", "FAIR": "moderate", "LOW": "low", "ROBUST": "low", "GOOD": "low", "EXCELLENT": "low",
    "NORMAL": "low", "BORDERLINE": "unsure", "not measurable": "unsure",
}  # fmt: skip
ONE_SIDED = "upper end uncorrected"  # of an interval corrected for selection: picking the largest can only inflate it
SHARES = ("accuracy", "next_token_accuracy", "agreement")
METRICS = {
    "perplexity": "perplexity",
    "kl": "divergence from the clean model (KL, nats per token)",
    "nll": "loss of the clean model (nats per token)",
    "margin": "margin of the best token (logits)",
}


def table(key: str, head: Iterable[str], rows: Iterable[Iterable[object]], caption: str = "") -> Table:
    """A table whose cells are made from values by their types. A column without any text is left out."""
    names, cells = tuple(head), [tuple(map(cell, row)) for row in rows]
    kept = [at for at in range(len(names)) if not cells or any(row[at].text for row in cells)]
    return Table(key, tuple(names[at] for at in kept), tuple(tuple(row[at] for at in kept) for row in cells), caption)


def cell(value: object) -> Cell:
    """A count, a rounded number, an estimate with its interval, or one line of text; empty for None."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, (Estimate, Correlation)):
        return estimate(value)
    if isinstance(value, Divergence):
        return divergence(value)
    if isinstance(value, int):
        return Cell(str(value), float(value))
    if value is None or isinstance(value, float):
        return Cell(number(value), value)
    return Cell(" ".join(str(value).split()))


def run_metric(run: Run) -> str:
    """The metric that losses of a run are shares of; the caller's own has no name."""
    return "custom" if run.data.measure == "custom" else run.metric


def described(metric: str) -> str:
    """A metric with its unit, for the title of a section or a row of a table."""
    return METRICS[metric] if metric in METRICS else metric_name(metric)


def capitalised(words: str) -> str:
    """For the start of a title: the rest keeps its letters, since KL is not "kl"."""
    return words[:1].upper() + words[1:]


def percent(value: float | None) -> str:
    return "" if value is None else findings.percent(value)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def span(low: float | None, high: float | None, show: Callable[[float | None], str] = number) -> str:
    """An interval: "[8.1 %, 17.0 %]", "[0.1, ...]" where an end is open, nothing where there is none."""
    return "" if low is None and high is None else f"[{show(low) or '...'}, {show(high) or '...'}]"


def estimate(found: Estimate | Correlation | None, *, share: bool = False, n: bool = False) -> Cell:
    """An estimate with its interval, and its n where asked: "12.3 % [8.1 %, 17.0 %] (n = 64)".

    What was not measured says so.
    """
    if found is None:
        return Cell("")
    if found.value is None:
        return Cell(found.note, tone="unsure" if found.note else "")
    show, rest = percent if share else number, f" (n = {found.n})" if n else ""
    return Cell(show(found.value), float(found.value), interval=span(found.low, found.high, show), rest=rest)


def divergence(found: Divergence | None) -> Cell:
    """The typical KL with its interval, and the mean beside it."""
    if found is None:
        return Cell("")
    cell = estimate(found.typical)
    return cell if cell.value is None else replace(cell, rest=f", mean {mean_words(found.mean) or 'not known'}")


def mean_words(mean: Estimate) -> str:
    """The mean of a KL: "0.12", or "at least 0.03" where its tail allows no upper end."""
    if mean.high is None and mean.low is not None:
        return f"at least {number(mean.low)}"
    return number(mean.value) or mean.note


def mean(found: Estimate) -> Cell:
    """The mean of a KL with its interval; its lower bound alone where the tail allows no upper end."""
    return Cell(mean_words(found), found.low) if found.high is None and found.low is not None else estimate(found)


def band(name: str | None) -> Cell:
    return Cell(name or "", tone=tone(name))


def point_band(name: str) -> Cell:
    """The band of a number that has no interval."""
    return Cell(f"{name} (by point value)", tone=tone(name))


def band_of(row: Effect) -> Cell:
    """The one band of a row; where its interval reaches into another, both, coloured as the one that is certain.

    No loss is certain, and none excluded, where that is the lowest: then it has the colour of the undecided.
    """
    if row.borderline:
        certain = tone(row.band)
        return Cell(f"{row.band} to {row.band_upper} (borderline)", tone="unsure" if certain == "low" else certain)
    return band(row.band)


def band_between(kind: str, found: Estimate | Threshold | None, decided: str) -> Cell:
    """The band of a metric by both ends of its interval; `decided` where there is no such interval."""
    if found is None or found.low is None or found.high is None:
        return band(decided)
    names = findings.band(kind, found.low), findings.band(kind, found.high)
    if names[0] == names[1]:
        return band(names[0])
    mildest = max((tone(name) for name in names), key=TONES.index)
    return Cell(f"{names[0]} to {names[1]} (borderline)", tone=mildest)


def tone(name: str | None) -> str:
    return _TONES.get(name or "", "")


def severity(name: Severity) -> str:
    """As people read it: what has no severity is ranked all the same."""
    return "ranked by KL" if name == NOT_RATED else name


def ranking_note(shown: Iterable[Finding], run: Run) -> str:
    """What the findings without a severity are; "" where all have one."""
    if all(finding.severity != NOT_RATED for finding in shown):
        return ""
    words, metric = Words.of(run.settings.question), metric_name(run_metric(run))
    return (
        f'"Ranked by KL": {words.subject} here {words.verb("moves", "move")} the output (KL in nats per token), and no '
        f"loss of {metric} large enough for a severity was measured."
    )


def finding_lines(finding: Finding) -> list[str]:
    """A finding as plain lines: the statement with its size, then a line for each note."""
    return [
        f"[{severity(finding.severity)}] {finding.component}: {finding.statement}{finding_span(finding)}",
        *finding.notes,
    ]


def finding_span(finding: Finding) -> str:
    """The interval of a finding's size and its n, to stand after the statement, which has the size."""
    if finding.size is None:
        return ""
    interval = estimate(finding.size, share=finding.unit == "share").interval
    if not interval:
        return f" (n = {finding.size.n})"
    corrected = f" (corrected for selection, {ONE_SIDED})" if finding.size.method == SELECTED else ""
    return f" {interval}{corrected}, n = {finding.size.n}"
