"""Numbers as words: the one place where a report's numbers are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noisescope import findings
from noisescope.reports.document import Cell

Row = Mapping[str, Any]
_TONES = {
    "CRITICAL": "critical", "AVALANCHE": "critical", "HIGH": "high", "POOR": "high", "MODERATE": "moderate",
    "MEDIUM": "moderate", "FAIR": "moderate", "LOW": "low", "ROBUST": "low", "GOOD": "low", "EXCELLENT": "low",
    "NORMAL": "low", "not measurable": "unsure",
}  # fmt: skip
SHARES = ("accuracy", "next_token_accuracy", "agreement")
METRICS = {
    "next_token_accuracy": "next-token accuracy",
    "agreement": "agreement with the clean model",
    "custom": "your metric",
    "kl": "divergence from the clean model (KL, nats a token)",
    "nll": "loss of the clean model (nats a token)",
    "margin": "margin of the best token (logits)",
}


def metric_name(metric: str) -> str:
    """A metric in a word or two."""
    return METRICS.get(metric, metric).partition(" (")[0]


def percent(value: float | None) -> str:
    return "" if value is None else findings.percent(value)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def estimate(row: Row | None, *, share: bool = False) -> Cell:
    """An estimate with its interval: "12.3 % [8.1 %, 17.0 %]". What was not measured says so."""
    if not row:
        return Cell("")
    if row.get("value") is None:
        return Cell(str(row.get("note", "")), tone="unsure" if row.get("note") else "")
    show = percent if share else number
    low, high = row.get("low"), row.get("high")
    span = "" if low is None and high is None else f" [{show(low) or '...'}, {show(high) or '...'}]"
    return Cell(f"{show(row['value'])}{span}", float(row["value"]))


def counted(row: Row | None, *, share: bool = False) -> Cell:
    """An estimate with its interval and its n."""
    cell = estimate(row, share=share)
    return cell if not row or row.get("value") is None else Cell(f"{cell.text} (n = {row['n']})", cell.value)


def band(name: str | None) -> Cell:
    return Cell(name or "", tone=tone(name))


def tone(name: str | None) -> str:
    return _TONES.get((name or "").split(" - ")[0], "")


def plain(value: float | None) -> Cell:
    return Cell(number(value), value)


def text(value: Any) -> Cell:
    """Anything as one line of text."""
    return Cell(" ".join(str(value).split()))


def whole(value: int | None) -> Cell:
    return Cell("") if value is None else Cell(str(value), float(value))


def finding_span(row: Row) -> str:
    """The interval of a finding and its n, to stand behind its statement."""
    interval = row["interval"]
    if interval is None:
        return f" (n = {row['n']})"
    show = percent if "of the accuracy" in row["statement"] else number
    low, high = ("..." if end is None else show(end) for end in interval)
    return f" [{low}, {high}], n = {row['n']}"
