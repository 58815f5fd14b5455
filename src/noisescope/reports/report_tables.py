"""A report as tables, as a few lines for a notebook, and as one flat dictionary of numbers for a tracker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from noisescope.comparison.roundoff import Digits, Roundoff
from noisescope.diagnosis.report import Robustness, RunReport
from noisescope.diagnosis.rows import Effect, LevelEffect
from noisescope.diagnosis.section_types import ChannelRow, CostlyChannel, ModuleScores
from noisescope.estimate import Estimate
from noisescope.findings import NOT_MEASURABLE, Finding, Recommendation
from noisescope.reports.cell_text import capitalised
from noisescope.reports.roundoff_sections import roundoff_lines
from noisescope.reports.saved_report import DiagnosisReport
from noisescope.tables import Sheet, Table

_TONES = {"LOW": "low", "MODERATE": "moderate", "HIGH": "critical"}
_WHERE = ("level", "component", "operator", "first_layer", "last_layer")
Value = DiagnosisReport | Robustness | Roundoff
Place = tuple[str, str, str | None, int | None, int | None]  # the cells of _WHERE


def sheet_of(value: Value) -> Sheet:
    """The risk and the findings; accuracy by noise level; or digits by layer."""
    if isinstance(value, Robustness):
        heads = {"noise_level": "noise", "accuracy": "accuracy", "retention": "retention", "band": "band of the loss"}
        levels = Table.of(LevelEffect, value.robustness.levels)
        title = f"Robustness at {len(levels.rows)} noise levels"
        return Sheet(title, {"levels": levels}, heads, (_asked(value), *value.could_not_see))
    if isinstance(value, Roundoff):
        digits = Table.of(Digits, value.roundoff.layers)
        heads = {"place": "place", "typical": "digits (typical token)", "worst": "digits (19 of 20 tokens)"}
        lines = (_asked(value), *roundoff_lines(value.roundoff), *value.could_not_see)
        return Sheet(f"Round-off in {value.roundoff.band.dtype}", {"digits": digits}, heads, lines)
    summary = value.executive_summary
    tables = {"effects": _effects(value), "findings": Table.of(Finding, value.findings)}
    tables["recommendations"] = Table.of(Recommendation, value.recommendations)
    if value.channel_analysis is not None:
        tables["channels"] = Table.of(ChannelRow, value.channel_analysis.per_layer.values())
        tables["costly_channels"] = Table.of(CostlyChannel, value.channel_analysis.costliest)
    if value.format_scores is not None:
        tables["formats"] = _formats(value.format_scores.modules)
    heads = {"severity": "severity", "component": "where", "statement": "finding"}
    lines = (f"{capitalised(summary.risk_meaning)}.", _asked(value), f"Next: {summary.next_step}")
    tone = _TONES.get(summary.overall_risk_level, "")
    shown = Table.of(Finding, summary.top_findings)
    return Sheet(f"Risk: {summary.overall_risk_level}", tables, heads, lines, shown, tone)


def _asked(value: RunReport) -> str:
    run = value.run
    model = f"{run.model.source} ({run.model.architecture}, {run.model.blocks} blocks)"
    return f"Model: {model}. Data: {run.data.source}, {run.data.samples} samples. Device: {run.device}."


def _rows(found: DiagnosisReport) -> Iterator[tuple[Place, Effect]]:
    """Every row of operators, windows, layers, places and the layer x operator map, and where it is."""
    for name, row in (found.operator_analysis or {}).items():
        yield ("operator", name, name, None, None), row
    section = found.layer_analysis
    if section is None:
        return
    for window in section.windows:
        first, last = window.start_layer, window.end_layer
        yield ("window", f"layers {first} to {last}", None, first, last), window
    for layer in section.layers:
        yield ("layer", f"layer {layer.layer}", None, layer.layer, layer.layer), layer
    for place, row in section.places.items():
        yield ("place", place, None, None, None), row
    for cell in section.map:
        yield ("cell", f"layer {cell.layer}, {cell.operator}", cell.operator, cell.layer, cell.layer), cell


def _effects(found: DiagnosisReport) -> Table:
    rows = list(_rows(found))
    return Table.of(Effect, (row for _, row in rows)).beside(_WHERE, (where for where, _ in rows))


def _formats(modules: tuple[ModuleScores, ...]) -> Table:
    columns = ("module", "place", "parameters", "format", "bits", "effective_bits", "predicted_kl", "standard_error")
    rows = (
        (one.module, one.place, one.parameters, name, score.bits, score.effective_bits, score.predicted_kl,
         score.standard_error)
        for one in modules
        for name, score in one.formats.items()
    )  # fmt: skip
    return Table(columns, tuple(rows))


# -- one flat dictionary


def metrics_of(value: Value) -> dict[str, float]:
    """Numbers by name: shares, nats per token, scores."""
    if isinstance(value, Robustness):
        found = _robustness(value)
    elif isinstance(value, Roundoff):
        band = value.roundoff.band
        found = {"band": band.expected, "band_limit": band.high}
        found |= {f"digits/{row.place}": row.typical for row in (*value.roundoff.layers, value.roundoff.logits)}
    else:
        found = _diagnosis(value)
    found |= {"cost/seconds": value.run.cost.seconds, "cost/trials": value.run.cost.trials}
    return dict(_flat(found))


def _flat(found: Mapping[str, Estimate | float | None]) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        parts = {"": value}
        if isinstance(value, Estimate):
            parts = {"": value.value, "_low": value.low, "_high": value.high}
        yield from ((name + end, float(part)) for end, part in parts.items() if isinstance(part, (int, float)))


def _robustness(found: Robustness) -> dict[str, Estimate | float | None]:
    numbers: dict[str, Estimate | float | None] = {}
    for row in found.robustness.levels:
        numbers[f"noise/{row.noise_level:g}/accuracy"] = row.accuracy
        numbers[f"noise/{row.noise_level:g}/retention"] = row.retention
    return numbers


def _ratings(found: DiagnosisReport) -> dict[str, float]:
    """Only of a run that could rate losses: zeros of a screen would look like a robust model."""
    summary = found.executive_summary
    return {
        "risk_score": summary.report_risk.score,
        "findings/urgent": sum(finding.urgent for finding in found.findings),
        "findings/rated": sum(finding.rated for finding in found.findings),
        "avalanche_points": summary.num_avalanche_points,
        "critical_operators": summary.num_critical_operators,
    }


def _diagnosis(found: DiagnosisReport) -> dict[str, Estimate | float | None]:
    summary, metrics = found.executive_summary, found.metrics
    primary, secondary = metrics.primary, metrics.secondary
    threshold, gradient, sparsity = (
        primary.critical_threshold, secondary.gradient_ratio, secondary.activation_sparsity,
    )  # fmt: skip
    numbers: dict[str, Estimate | float | None] = {
        **(_ratings(found) if summary.overall_risk_level != NOT_MEASURABLE else {}),
        "outlier_channels": summary.total_outlier_channels,
        "degradation": primary.relative_degradation,
        "noise_tolerance_index": primary.noise_tolerance_index,
        "critical_threshold": None if threshold is None else threshold.value,
        "snr_db": secondary.snr_db,
        "gradient_ratio": None if gradient is None else gradient.value,
        "activation_sparsity": None if sparsity is None else sparsity.relative,
    }
    if metrics.baseline is not None:
        numbers |= {f"clean/{name}": estimate for name, estimate in metrics.baseline.metrics.items()}
    for (level, component, operator, layer, _), row in _rows(found):
        if level in ("operator", "layer", "place"):
            name = {"operator": operator, "layer": layer, "place": component}[level]
            numbers[f"{level}/{name}/kl"] = row.nats if row.divergence is not None else None
            numbers[f"{level}/{name}/degradation"] = row.degradation
    if found.precision_plan is not None:
        plan = found.precision_plan
        numbers |= {"plan/average_bits": plan.average_bits, "plan/predicted_mean_kl": plan.predicted_mean_kl}
        numbers |= {"plan/mean_kl": plan.mean_kl, "plan/typical_kl": plan.typical_kl}
    return numbers
