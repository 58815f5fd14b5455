"""One ranked list of findings, which the summary, the recommendations and every plan use.

    1. Losses of the task metric whose interval clears the limit of a band: by band, then by size.
    2. Significant losses whose interval reaches from the lowest band into a higher one: borderline.
    3. Places where noise moves the output more than in most others: by nats per token, no band.
    4. Channels far larger than the rest: they matter for 8-bit activations, and are not findings about a layer.

Noise in a window is also noise in its layers, and noise in an operator is also noise in its cells. Where a part
accounts for what the whole costs, the part is the finding, and a note says what the whole adds; else the window or the
layer is the finding, and a note names its largest part. So no place is counted twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from noisescope.diagnosis.format_question import NOISE, Words
from noisescope.diagnosis.rows import Effect, LayerAnalysis, cell_target
from noisescope.diagnosis.section_types import ChannelAnalysis, Sections
from noisescope.findings import BORDERLINE, NOT_MEASURABLE, NOT_RATED, SEVERITIES, Finding, Target, metric_name, percent
from noisescope.findings.finding import Severity, span
from noisescope.sites import GROUPS, OuterPlace
from noisescope.stats import Estimate

STANDS_OUT = 1.5  # times the nats of the median layer: worth a finding
MOST_PLACES = 12  # findings of kind 3
MOST_CHANNELS = 3  # modules
RATED = ("CRITICAL", "HIGH", "MODERATE", BORDERLINE)
BAND_SEVERITY: dict[str, Severity] = {
    "CRITICAL": "CRITICAL",
    "AVALANCHE": "HIGH",
    "HIGH": "HIGH",
    "MODERATE": "MODERATE",
}
Excess = Callable[[Target, Target], Estimate | None]


@dataclass(frozen=True)
class Candidate:
    """A place or an operator with the effect of noise there."""

    target: Target
    effect: Effect
    at_least: Severity | None = None  # severity of a whole that this part accounts for

    @property
    def severity(self) -> Severity:
        """Decided by the interval: the band that its lower end reaches."""
        own: Severity = NOT_RATED
        if self.effect.evidence == "failed":
            own = NOT_MEASURABLE
        elif self.effect.loss is not None and self.effect.loss >= 0:
            own = BAND_SEVERITY.get(self.effect.band, BORDERLINE if self.effect.borderline else "LOW")
        return own if self.at_least is None else min(own, self.at_least, key=SEVERITIES.index)

    @property
    def size(self) -> Estimate | None:
        """The loss, corrected for selection where it is the largest of its table."""
        return self.effect.selected or self.effect.degradation

    @property
    def loss(self) -> float:
        return (self.size.value or 0.0) if self.size is not None else 0.0


def candidates(found: Sections) -> list[Candidate]:
    """Every row that may become a finding; groups of operators stand for their parts."""
    rows: list[Candidate] = []
    operators = found.operator_analysis or {}
    for name in counted_once(operators):
        rows.append(Candidate(Target("operator", (name,)), operators[name]))
    layers = found.layer_analysis
    if layers is not None:
        rows += [Candidate(layers.window_target(row), row) for row in layers.windows]
        rows += [Candidate(layers.layer_target(row), row) for row in layers.layers]
        rows += [Candidate(place_target(place), row) for place, row in layers.places.items()]
        rows += [Candidate(cell_target(row), row) for row in layers.map]
    return [row for row in rows if row.effect.evidence not in ("absent", "none")]


def place_target(place: OuterPlace) -> Target:
    """A place outside the blocks, with the one operator that it computes."""
    computed = {"embed": "embedding", "final_norm": "norm", "lm_head": "linear"}
    return Target("place", (computed[place],) if place in computed else (), place=place)


def whole_model(found: Sections, words: Words = NOISE) -> Finding | None:
    """The cost of noise in all layers at once: a fact about the model, in addition to findings about its parts.

    None where no layers were measured: the operator is a finding like others then.
    """
    operators = found.operator_analysis or {}
    noised = found.layer_analysis.operators[0] if found.layer_analysis is not None else ""
    if noised not in operators or operators[noised].evidence in ("absent", "none"):
        return None
    row = Candidate(Target("model", (noised,)), operators[noised])
    if row.severity in RATED:
        return _rated(row, (), None, words)
    return _failed(row) if row.severity == NOT_MEASURABLE else None


def counted_once(operators: Iterable[str]) -> list[str]:
    """Names that stand for every operator once: a group stands for its parts."""
    names = list(operators)
    parts = {part for name in names if name in GROUPS for part in GROUPS[name][0]}
    return [name for name in names if name in GROUPS or name not in parts]


def ranked_findings(found: Sections, excess: Excess = lambda whole, part: None, words: Words = NOISE) -> list[Finding]:
    """All findings about parts of the model, the most important first.

    `excess` gives what noise in a whole costs beyond noise in a part of it, sample by sample, with its interval; None
    where samples are not available. `words` names what was injected, if that is not noise.
    """
    whole = whole_model(found, words)
    same = () if whole is None else whole.target.operators
    rows = [row for row in candidates(found) if (row.target.kind, row.target.operators) != ("operator", same)]
    typical = typical_nats(found.layer_analysis)
    rated = [row for row in rows if row.severity in RATED]
    kept = _without_nested(_one_window_per_region(rated), lambda whole, part: _loss_accounted_for(whole, part, excess))
    findings = [_rated(row, notes, found.layer_analysis, words) for row, notes in kept]
    named = [row.target for row, _ in kept]
    moved = [
        row
        for row in rows
        if row.severity == NOT_RATED
        and row.effect.nats >= STANDS_OUT * typical > 0
        and row.target.kind in ("layer", "place", "cell")
        and not any(_covered(row.target, target) for target in named)
    ]
    kept = _without_nested(moved, lambda whole, part: False)
    scale = 1.0 if found.layer_analysis is None else found.layer_analysis.prediction_scale
    findings += [
        _unrated(row, notes, typical, scale, words) for row, notes in sorted(kept, key=lambda one: -one[0].effect.nats)
    ][:MOST_PLACES]
    findings += [_failed(row) for row in rows if row.severity == NOT_MEASURABLE and row.target.kind != "layer"]
    findings += _channel_findings(found.channel_analysis)
    return sorted(findings, key=_order)


def _covered(target: Target, named: Target) -> bool:
    """Whether a finding about `named` covers the target: the same place, a part of it, or a place that it is in.

    A finding about an operator everywhere names no place.
    """
    return named.kind != "operator" and (target == named or target.contains(named) or named.contains(target))


def _order(finding: Finding) -> tuple[int, int, float, float]:
    """By severity; numbers that are not finite first and outlier channels last; then by loss or by nats."""
    loss = finding.size.value if finding.unit == "share" and finding.size is not None else None
    return (
        SEVERITIES.index(finding.severity),
        ("count", "share", "nats", "ratio").index(finding.unit),
        -(loss or 0.0),
        -(finding.nats or 0.0),
    )


def typical_nats(layers: LayerAnalysis | None) -> float:
    """The effect of noise in the median layer."""
    known = [row.nats for row in layers.layers] if layers is not None else []
    return statistics.median(known) if known else 0.0


def _one_window_per_region(rows: Sequence[Candidate]) -> list[Candidate]:
    """Of windows that share layers, the one that loses most: one hot layer lifts all windows that hold it."""
    kept: list[Candidate] = []
    taken: set[int] = set()
    for row in sorted(rows, key=lambda row: -row.loss):
        layers = set(row.target.layers) if row.target.kind == "window" else set()
        if not layers & taken:
            kept.append(row)
            taken |= layers
    return kept


def _without_nested(
    rows: Sequence[Candidate], accounted_for: Callable[[Candidate, Candidate], bool]
) -> list[tuple[Candidate, tuple[str, ...]]]:
    """The rows without wholes that a part accounts for, and without parts of places that are kept; notes say which."""
    notes: dict[Target, list[str]] = {row.target: [] for row in rows}
    gravest = {row.target: row.severity for row in rows}
    dropped: set[Target] = set()
    for whole in sorted(rows, key=lambda row: -_extent(row.target)):
        parts = [part for part in rows if whole.target.contains(part.target) and part.target not in dropped]
        enough = [part for part in parts if accounted_for(whole, part)]
        if whole.target in dropped or not parts:
            continue
        if enough:
            best = max(enough, key=lambda part: (-_extent(part.target), part.loss, part.effect.nats))
            dropped.add(whole.target)
            adds = f"{whole.target.name}: {percent(whole.loss)} lost, not detectably more than here"
            notes[best.target] += [*notes[whole.target], adds]
            gravest[best.target] = min(gravest[best.target], gravest[whole.target], key=SEVERITIES.index)
        elif whole.target.layers:
            largest = max(parts, key=lambda part: (part.loss, part.effect.nats))
            dropped |= {part.target for part in parts}
            notes[whole.target].append(_largest_part(whole, largest))
    return [
        (replace(row, at_least=gravest[row.target]), tuple(notes[row.target]))
        for row in rows
        if row.target not in dropped
    ]


def _extent(target: Target) -> int:
    """How much of the model a target covers: an operator everywhere, windows, layers, cells."""
    return {"operator": 10**6, "window": 1000 + len(target.layers), "layer": 100}.get(target.kind, 1)


def _loss_accounted_for(whole: Candidate, part: Candidate, excess: Excess) -> bool:
    """Whether the whole does not lose significantly more than the part, sample by sample.

    If samples are not available, whether it loses more by less than the run could have detected.
    """
    beyond = excess(whole.target, part.target)
    if beyond is not None:
        return not beyond.above(0.0)
    seen = whole.effect.smallest_detectable
    return seen is not None and whole.loss - part.loss < seen


def _largest_part(whole: Candidate, part: Candidate) -> str:
    if whole.severity == NOT_RATED:
        if part.effect.evidence != whole.effect.evidence:  # a share of a measurement is no prediction
            how = "predicted" if part.effect.evidence == "predicted" else part.effect.evidence
            return f"most of it in {part.target.name} ({how}: {part.effect.nats:.3g} nats per token)"
        share = min(part.effect.nats / whole.effect.nats, 1.0)
        return f"{percent(share, 0)} of it in {part.target.name}"
    return f"{part.target.name} alone: {percent(part.loss)} lost"


def _rated(row: Candidate, notes: tuple[str, ...], layers: LayerAnalysis | None, words: Words) -> Finding:
    effect, metric = row.effect, metric_name(row.effect.metric)
    assert effect.baseline_acc is not None and effect.noisy_acc is not None
    change = f"{percent(effect.baseline_acc)} to {percent(effect.noisy_acc)}"
    if effect.metric == "perplexity":
        change = f"perplexity {effect.baseline_acc:.3g} to {effect.noisy_acc:.3g}"
    statement = f"{words.costs} {percent(row.loss)} of the {metric} ({change})"
    if effect.borderline:
        statement += f"; the interval reaches from {effect.band} to {effect.band_upper}"
    return Finding(
        severity=row.severity,
        component=row.target.name,
        statement=statement,
        target=row.target,
        size=row.size,
        unit="share",
        nats=effect.nats,
        evidence="injected",
        notes=(*notes, *_layer_notes(row, layers, words)),
    )


def _unrated(row: Candidate, notes: tuple[str, ...], typical: float, prediction_scale: float, words: Words) -> Finding:
    effect = row.effect
    assert effect.divergence is not None
    times = f"{_two_digits(effect.nats / typical)} times the median layer"
    moves = words.verb("moves", "move")
    verb = moves if effect.injected else f"{words.verb('is', 'are')} predicted to move"
    return Finding(
        severity=NOT_RATED,
        component=row.target.name,
        statement=f"{words.subject} here {verb} the output by {effect.nats:.3g} nats per token",
        target=row.target,
        size=effect.divergence.typical if effect.injected else effect.divergence.typical.times(prediction_scale),
        unit="nats",
        nats=effect.nats,
        evidence=effect.evidence,
        notes=(times, *notes, *_nonlinearity_note(effect, words)),
    )


def _two_digits(times: float) -> str:
    """Two digits: more would not hold on other samples."""
    return f"{times:.1f}" if times < 10 else f"{float(f'{times:.2g}'):.0f}"


def _failed(row: Candidate) -> Finding:
    statement = f"could not be measured: {row.effect.error}"
    return Finding(NOT_MEASURABLE, row.target.name, statement, row.target, None, "share", None, "failed")


def _layer_notes(row: Candidate, layers: LayerAnalysis | None, words: Words) -> Iterable[str]:
    """What else the run shows about the same layers."""
    for point in layers.avalanche_points if layers is not None else ():
        if row.target.layers and set(row.target.layers) <= set(range(point.start, point.end + 1)):
            where = f"layers {point.start} to {point.end}"
            if not point.decided:
                yield f"{where} may be an avalanche point: the intervals overlap the limit"
            elif point.ratio is not None:
                times = f"{point.ratio.value:.1f} {span(point.ratio, '.1f')}"
                yield f"{where} are an avalanche point: {times} times their neighbours"
            else:
                yield f"{where} are an avalanche point: their neighbours lose much less"
    for window in layers.windows if layers is not None and row.target.kind == "window" else ():
        index = window.interaction_index
        if window.layers == row.target.layers and index is not None and index.compounds:
            together = f"{words.subject} in all {words.verb('diverges', 'diverge')}"
            yield f"errors compound: {together} {index.index.value:.2f} times as far as the sum of each alone"
    yield from _nonlinearity_note(row.effect, words)


def _nonlinearity_note(effect: Effect, words: Words) -> Iterable[str]:
    if effect.nonlinear and effect.injected_over_predicted is not None:
        times = effect.injected_over_predicted.value
        injected = "rounding here diverges" if words.plural else "injected noise diverges"
        yield f"{injected} {times:.2f} times as far as predicted: the response is not linear here"


def _channel_findings(found: ChannelAnalysis | None) -> list[Finding]:
    """By the largest ratio: one or two massive channels are the worst case, however small their share."""
    if found is None:
        return []
    worst = sorted(found.per_layer.items(), key=lambda pair: (-pair[1].nonfinite_channels, -pair[1].max_ratio))
    rows = []
    for name, row in worst[:MOST_CHANNELS]:
        layers = (row.layer,) if isinstance(row.layer, int) else ()
        target = Target("channels", (row.operator,), layers, module=name)
        if row.nonfinite_channels:
            statement = (
                f"{row.nonfinite_channels} of {row.total_channels} channels contain NaN or infinity even without noise"
            )
            size = Estimate(float(row.nonfinite_channels), None, None, found.n)
            rows.append(Finding("CRITICAL", name, statement, target, size, "count", None, "captured"))
        if row.num_outliers:
            statement = (
                f"{row.num_outliers} of {row.total_channels} channels are outliers, the largest {row.max_ratio:.1f} "
                "times the median: matters for 8-bit activations (W8A8)"
            )
            size = Estimate(row.max_ratio, None, None, found.n)
            rows.append(Finding(NOT_RATED, name, statement, target, size, "ratio", None, "captured"))
    return rows
