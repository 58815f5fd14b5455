"""Channels, number formats, metrics and correlations as sections."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.diagnosis.sections import ChannelRow, CostlyChannel, ExpectedCorrelation, Metrics, Threshold, Trace
from noisescope.reports.document import Block, Cell, Paragraph, Section, Table
from noisescope.reports.values import DiagnosisReport
from noisescope.reports.words import (
    SHARES,
    band,
    band_between,
    counted,
    counted_noun,
    described,
    estimate,
    number,
    plain,
    point_band,
    span,
    text,
    whole,
)
from noisescope.stats import Estimate

WORST = 10  # rows of a table that only shows the worst
_PAIRS = {
    "hessian_sensitivity": "Hessian trace and sensitivity",
    "outliers_sensitivity": "outlier channels and sensitivity",
    "sparsity_degradation": "activation sparsity and degradation",
    "outliers_windows": "outlier channels and loss, by window",
}


def channels(report: DiagnosisReport) -> Iterable[Section]:
    section = report.channel_analysis
    if section is None:
        return
    blocks: list[Block] = []
    if section.error:
        blocks.append(Paragraph(section.error, "Not measured:"))
    if section.summary is not None:
        found = section.summary
        blocks.append(
            Paragraph(
                f"{found.total_outlier_channels} outlier channels of {found.total_channels} "
                f"({found.outlier_percentage:.2g} %) in {counted_noun(found.layers_with_outliers, 'module')}; "
                f"n = {section.n} samples. "
                f"The largest value of an outlier is more than {section.threshold:g} times that of the median channel "
                "(by max). Other rules: the mean in place of the largest; a 99th percentile above 5 times the "
                "channel's own median (q99/q50); the 5 % whose noise costs most (Fisher)."
            )
        )
        worst = sorted(section.per_layer.items(), key=lambda pair: -pair[1].max_ratio)[:WORST]
        body = tuple((text(name), *_outliers(row)) for name, row in worst)
        head = ("module", "outliers", "channels", "largest / median", "band", "by max", "by mean", "by q99/q50",
                "by Fisher")  # fmt: skip
        blocks.append(Table("outliers", head, body, "Modules with the largest outliers"))
    if section.costliest:
        columns = ("module", "channel", "mean KL predicted", "mean KL injected", "evidence")
        costs = tuple(map(_costly, section.costliest[:WORST]))
        blocks.append(Table("costliest", columns, costs, "Channels whose noise costs most"))
    yield Section("channels", "Channels", tuple(blocks))


def _outliers(row: ChannelRow) -> tuple[Cell, ...]:
    """How many, which (the largest four), and what each rule says."""
    ratios = sorted(zip(row.outlier_ratios, row.outlier_indices, strict=False), reverse=True)
    which = ", ".join(str(index) for _, index in ratios[:4]) + (", ..." if len(ratios) > 4 else "")
    count = Cell(str(row.num_outliers), row.num_outliers, rest=f" of {row.total_channels}")
    rules = row.rules
    by_rule = (whole(rules.max), whole(rules.mean), whole(rules.quantile), whole(rules.fisher))
    return count, text(which), Cell(f"{row.max_ratio:.1f} x", row.max_ratio), band(row.band), *by_rule


def _costly(row: CostlyChannel) -> tuple[Cell, ...]:
    injected = estimate(None if row.kl is None else row.kl.mean)
    return text(row.module), whole(row.channel), plain(row.predicted_nats), injected, text(row.evidence)


def formats(report: DiagnosisReport) -> Iterable[Section]:
    """What one number format for all weights would cost; plans mix them."""
    section = report.format_scores
    if section is None or not section.uniform:
        return
    body = tuple(
        (text(name), whole(row.bits), plain(row.effective_bits), plain(row.predicted_kl))
        for name, row in section.uniform.items()
    )
    explained = (
        "Predicted from the rounding error of each weight, and added up over the linears of all blocks, in nats per "
        "token. Trust the order; the size is only rough. `noisescope plan precision` mixes formats and measures the "
        "result."
    )
    head = ("format of every linear", "bits per weight", "with scales", "mean KL predicted")
    yield Section("formats", "Number formats for the weights", (Paragraph(explained), Table("formats", head, body)))


def metrics(report: DiagnosisReport) -> Iterable[Section]:
    found = report.metrics
    blocks: list[Block] = [Table("metrics", ("metric", "value", "band"), tuple(_metric_rows(found)))]
    if found.baseline is not None:
        known = tuple(
            (text(described(name)), counted(row, share=name in SHARES))
            for name, row in found.baseline.metrics.items()
            if name != "agreement"  # of the clean model with itself
        )
        blocks.append(Table("baseline", ("metric", "mean"), known, "The clean model"))
    traces = found.hessian_trace
    if traces is not None and traces.error:
        blocks.append(Paragraph(traces.error, "Hessian traces were not measured:"))
    elif traces is not None and traces.layers:
        ordered = sorted(traces.layers.items(), key=lambda pair: int(pair[0]))
        curved = tuple(
            (Cell(f"layer {layer}", float(layer)), _trace(row), plain(row.per_parameter)) for layer, row in ordered
        )
        blocks.append(Table("hessian", ("layer", "trace", "per parameter"), curved, "Hessian trace of each layer"))
    yield Section("metrics", "Metrics", tuple(blocks))


def _metric_rows(found: Metrics) -> Iterable[tuple[Cell, Cell, Cell]]:
    primary, secondary = found.primary, found.secondary
    yield (
        text("relative degradation"),
        counted(primary.relative_degradation, share=True),
        _band("degradation", primary.relative_degradation, primary.degradation_band),
    )
    index, snr = primary.noise_tolerance_index, secondary.snr_db
    tolerance = _band("noise_tolerance_index", index, primary.noise_tolerance_band)
    yield text("noise tolerance index"), counted(index), tolerance
    threshold = primary.critical_threshold
    if threshold is not None:
        reached = band_between("critical_threshold", threshold.low, threshold.high, threshold.band)
        yield text("critical threshold"), _threshold(threshold), reached
    yield text("SNR of the logits (dB)"), counted(snr), _band("snr_db", snr, secondary.snr_band)
    gradients = secondary.gradient_ratio
    if gradients is not None:
        cell = Cell(number(gradients.value), gradients.value, rest=f" (n = {gradients.n})")
        yield text("gradient ratio"), cell, point_band(gradients.point_band)
    sparsity = secondary.activation_sparsity
    if sparsity is not None:
        yield text("activation sparsity"), plain(sparsity.relative), point_band(sparsity.point_band)


def _band(kind: str, found: Estimate | None, decided: str) -> Cell:
    return band(decided) if found is None else band_between(kind, found.low, found.high, decided)


def _threshold(found: Threshold) -> Cell:
    return Cell(found.label, found.value, interval=span(found.low, found.high), rest=f" (n = {found.n})")


def _trace(row: Trace) -> Cell:
    return Cell(number(row.trace), row.trace, interval=span(row.low, row.high))


def correlations(report: DiagnosisReport) -> Iterable[Section]:
    """Whether what the original method notes expect holds: decided by the interval."""
    if not report.correlations:
        return
    body = tuple(
        (
            text(_PAIRS.get(name, name)),
            estimate(row.correlation),
            text(row.expected),
            text(_held(row)),
            plain(row.without_one),
            whole(row.correlation.n),
        )
        for name, row in report.correlations.items()
    )
    head = ("pair", "r", "expected", "held", "r without the most influential layer", "n")
    explained = (
        "An expectation held where the whole interval clears its limit, did not hold where the whole interval misses "
        "it, and is undecided otherwise. It is carried by one layer where leaving out that layer changes the answer."
    )
    table = Table("correlations", head, body)
    yield Section("correlations", "Correlations", (Paragraph(explained), table))


def _held(row: ExpectedCorrelation) -> str:
    """Nothing where nothing is expected."""
    if not row.expected:
        return ""
    return f"{row.held}, carried by one layer" if row.carried_by_one else row.held
