"""What round-off does to a model, in words and tables."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.comparison.roundoff import GreedyForecast, Roundoff, RoundoffBand, RoundoffFound
from noisescope.reports.cell_text import number, percent, table
from noisescope.reports.document import Bar, Block, Cell, Chart, Paragraph, Section

_HEAD = ("place", "digits (typical token)", "digits (19 of 20 tokens)")


def roundoff_sections(report: Roundoff) -> Iterable[Section]:
    found = report.roundoff
    lines = tuple(Paragraph(line) for line in roundoff_lines(found))
    yield Section("roundoff", "Round-off", (*lines, _by_surprise(found.band)))
    bars = tuple(Bar(row.place, Cell(_digits(row.typical), row.typical)) for row in found.layers if row.typical)
    blocks: list[Block] = [Chart("digits", "Digits after each block", "decimal digits", bars)] if bars else []
    yield Section("digits", "Significant digits", (*blocks, table("digits-table", _HEAD, digit_rows(found)), _METHOD))


_METHOD = Paragraph(
    "Digits are -log10 of the relative error: of a block's output vector for each token, and of a token's logits after "
    "subtracting their mean. The typical token has the median; 19 of 20 tokens have at least the second number.",
    "How digits are counted.",
)


_MEASURED = {
    "rounding": "",
    "float64": " Measured as the distance of this model to its own result in float64, times sqrt 2 for two systems.",
}


def roundoff_lines(found: RoundoffFound) -> list[str]:
    """The band and the forecast, each in a sentence or two."""
    band = found.band
    expected = band.expected
    ends = "" if expected.low is None else f" (95 % interval {number(expected.low)} to {number(expected.high)})"
    lines = [
        f"Two healthy systems in {band.dtype} differ by {number(expected.value)} nats per token in mean |difference| "
        f"of log-probabilities{ends}; n = {band.sequences} sequences, {band.tokens} tokens.{_MEASURED[band.method]}",
        f"On these tokens, a gap of up to {number(band.high)} is round-off: a healthy pair exceeds it in "
        f"{percent(band.false_alarm)} of cases. Pairs that share kernels stay below {number(band.low)}.",
    ]
    return lines + ([] if found.greedy is None else [_greedy(found.greedy)])


def _greedy(found: GreedyForecast) -> str:
    median, rate = found.median_tokens, found.per_token
    share = f"the likeliest token differs at {percent(rate.value)} of the tokens"
    if median.value is None:
        least = "" if median.low is None else f" (at least {median.low:.0f} with 97.5 % confidence)"
        return (
            f"Fewer than half of {found.texts} greedy texts differ within {found.watched} tokens{least}; {share}. "
            "Raise --max-new-tokens to see the median."
        )
    low = "1" if median.low is None else f"{median.low:.0f}"
    high = f"more than {found.watched}" if median.high is None else f"{median.high:.0f}"
    return (
        f"Half of their greedy texts differ after {median.value:.0f} tokens (95 % interval {low} to {high}; "
        f"{found.texts} texts); {share}."
    )


def digit_rows(found: RoundoffFound) -> list[tuple[str, str, str]]:
    rows = [(f"layer {row.place}", row) for row in found.layers] + [("logits", found.logits)]
    return [(name, _digits(row.typical), _digits(row.worst)) for name, row in rows]


def _digits(value: float | None) -> str:
    return "all" if value is None else f"{value:.1f}"


def _by_surprise(band: RoundoffBand) -> Block:
    rows = (
        (f"{number(one.low)} to {'...' if one.high is None else number(one.high)}", one.expected, one.tokens)
        for one in band.by_surprise
    )
    head = ("-log p of the token (nats)", "expected |difference| (nats)", "tokens")
    return table("by-surprise", head, rows, "Expected |difference| by how likely the token is")
