"""Which places to validate first on new hardware, in which precision, and how: from the findings of a diagnosis.

    priority 1   a finding rated HIGH or CRITICAL, the layers that all windows of an avalanche point share, a loss
                 above a tenth of the score, three times the nats of the median layer, or channels that are not finite:
                 compared in full, MAPE below 5 %
    priority 2   a finding rated MODERATE, the other layers of an avalanche point, a borderline avalanche point, a loss
                 of a twentieth, one and a half times the median layer's nats, or a linear with channels 20 times the
                 median: outputs compared, MAPE below 10 %
    priority 3   all others: standard formats, nothing special

Losses count where they are significant, and limits are passed by whole intervals. Within a priority, places come in the
order of the report's findings, then by nats: the first places of the plan are what the first findings are about.

Outlier channels are an estimate of what 8-bit activations would lose, not a measured loss, so they never come before
one. They are those of linears: a massive channel of the residual stream stays in it to the end, so it does not
distinguish one layer from another. Places outside the blocks (embed, lm_head) are ranked, too. Records keep whole
tensors of blocks alone, or of everything, so these places are compared by sketch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noisescope.diagnosis.ranked_findings import STANDS_OUT, typical_nats
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import Effect, LayerAnalysis
from noisescope.diagnosis.section_types import ChannelRow, Conclusions
from noisescope.errors import InvalidInput
from noisescope.findings import ADVICE, BANDS, BORDERLINE, LIMITS, Finding, metric_name, percent
from noisescope.findings.finding import counted
from noisescope.options.command_text import command_line
from noisescope.options.device_commands import CompareOptions, LocateOptions, RecordOptions
from noisescope.options.plans import FaultTestOptions
from noisescope.sites import NamedPlace, OuterPlace
from noisescope.tables import Sheet, Table, Tabular

Rank = Literal[1, 2, 3]
COSTLY = 3.0  # times the median layer's nats: priority 1; a finding (STANDS_OUT) is priority 2
HEADROOM = 0.5  # of FP16's range may be used by what was captured: other inputs go further
REFERENCE, TARGET, COMPARISON = "reference.record", "target.record", "comparison.json"
NOT_FILES = ("demo", "built-in text", "tokenised batches")  # data that a command can't name
MAX_MAPE: dict[Rank, float | None] = {1: LIMITS["migration_mape"], 2: LIMITS["migration_mape_second"], 3: None}


@dataclass(frozen=True)
class PlaceEvidence:
    """Why a place has its priority, the strongest reason first; `loss` only where it is significant."""

    place: NamedPlace
    reasons: tuple[str, ...]
    nats: float
    loss: float | None
    largest_activation: float | None


@dataclass(frozen=True)
class Priority:
    """Places of one priority, the first to validate first. `precision` is by place."""

    priority: Rank
    layers: tuple[int, ...]
    places: tuple[OuterPlace, ...]
    precision: Mapping[str, str]
    validation: str
    max_mape: float | None
    evidence: tuple[PlaceEvidence, ...]


@dataclass(frozen=True)
class MigrationPlan(Tabular):
    """Every place of a model under one of three priorities."""

    priorities: tuple[Priority, ...]
    fallback: str
    notes: tuple[str, ...]

    def sheet(self) -> Sheet:
        rows = [(one, evidence) for one in self.priorities for evidence in one.evidence]
        places = Table.of(PlaceEvidence, (evidence for _, evidence in rows)).beside(
            ("priority", "precision", "max_mape"),
            ((one.priority, one.precision[str(evidence.place)], one.max_mape) for one, evidence in rows),
        )
        counts = ", ".join(f"{len(one.evidence)} of priority {one.priority}" for one in self.priorities)
        heads = {"priority": "priority", "place": "place", "precision": "precision", "max_mape": "MAPE allowed"}
        lines = (f"If a comparison fails: {self.fallback}", *self.notes)
        return Sheet(f"Places to validate: {counts}", {"places": places}, heads | {"reasons": "why"}, lines)


@dataclass(frozen=True)
class Command:
    """A command line, and the machine to run it on."""

    where: str
    command: str


@dataclass(frozen=True)
class MigrationSteps(MigrationPlan):
    """A migration plan with the commands to run next."""

    commands: tuple[Command, ...]


def plan_migration(
    found: Diagnosis,
    *,
    path: str = "report.json",
    device: str = "cuda",
    model: str | None = None,
    data: str | Path | None = None,
) -> MigrationSteps:
    """Priorities with their evidence, precision and validation, and the commands to run next.

    Into the commands go `path`, where the report lies, `device`, what the new machine calls its accelerator, and the
    model and data, for a report cuts absolute paths.
    """
    plan = rank_places(found)
    typed = {"model": model, "data": None if data is None else str(data)}
    given = {name: value for name, value in typed.items() if value is not None}
    return MigrationSteps(**vars(plan), commands=tuple(_commands(found, plan.priorities, path, device, given)))


def rank_places(found: Diagnosis | Conclusions) -> MigrationPlan:
    """Priorities with their evidence, precision and validation."""
    section = found.layer_analysis
    if isinstance(found, Diagnosis) and found.run.settings.question is not None:
        raise InvalidInput(
            f"this report is of {found.run.settings.question.name}, and a migration plan ranks places by noise: "
            "noisescope diagnose MODEL, without --perturbation"
        )
    if section is None:
        raise InvalidInput(
            "a migration plan needs a report with the layer level: run noisescope diagnose MODEL --level "
            "operator,layer,channel"
        )
    rows: list[tuple[NamedPlace, Effect]] = [(row.layer, row) for row in section.layers]
    rows += section.places.items()
    channels = found.channel_analysis.per_layer if found.channel_analysis is not None else {}
    view = _View(section, channels, found.findings, typical_nats(section))
    judged = [_judged(view, place, row) for place, row in rows]
    judged.sort(key=lambda one: (one[0], view.position(one[1].place), -one[1].nats))
    ranks: tuple[Rank, ...] = (1, 2, 3)
    predicted = not any(row.injected for _, row in rows)
    return MigrationPlan(
        tuple(_priority(rank, [evidence for of, evidence in judged if of == rank]) for rank in ranks),
        ADVICE["divergence"],
        ("ranked by predictions alone: run diagnose with --effort standard to confirm them",) if predicted else (),
    )


@dataclass(frozen=True)
class _View:
    """What a diagnosis says about places."""

    section: LayerAnalysis
    channels: Mapping[str, ChannelRow]  # by the module's name
    findings: tuple[Finding, ...]
    median: float  # nats of the median layer

    def about(self, place: NamedPlace) -> Iterable[Finding]:
        """Findings on a place, in order. Findings on channels count if a linear has them."""
        linears = {name for name, row in self.channels.items() if row.operator == "linear"}
        for finding in self.findings:
            of_channels = finding.target.kind == "channels"
            if place in finding.target.places and (not of_channels or finding.target.module in linears):
                yield finding

    def position(self, place: NamedPlace) -> int:
        """The position of a place in the list of findings; after the end if it is not there."""
        first = next(iter(self.about(place)), None)
        return len(self.findings) if first is None else self.findings.index(first)

    def captured(self, place: NamedPlace) -> list[tuple[str, ChannelRow]]:
        return [(name, row) for name, row in self.channels.items() if row.layer == place]


def _judged(view: _View, place: NamedPlace, row: Effect) -> tuple[Rank, PlaceEvidence]:
    """A place's priority and every reason for it, the strongest first."""
    found = [*_by_findings(view, place), *_by_avalanches(view, place), *_by_effect(view, place, row)]
    found += [*_by_cells(view, place), *_by_channels(view, place)]
    found.sort(key=lambda reason: reason[0])
    largest = max((info.global_max for _, info in view.captured(place)), default=None)
    reasons = tuple(dict.fromkeys(reason for _, reason in found))
    return (found[0][0] if found else 3), PlaceEvidence(place, reasons, row.nats, row.loss, largest)


def _by_findings(view: _View, place: NamedPlace) -> Iterable[tuple[Rank, str]]:
    """A window's findings count for all its layers, unless an avalanche point says which of them."""
    points = {(point.start, point.end) for point in view.section.avalanche_points}
    for finding in view.about(place):
        target = finding.target
        ends = (target.layers[0], target.layers[-1]) if target.kind == "window" else None
        if target.kind == "channels" or ends in points:
            continue
        words = f"{finding.component}: {finding.statement}"
        if finding.rated or finding.severity == BORDERLINE:
            yield (1, words) if finding.urgent else (2, words)


def _by_cells(view: _View, place: NamedPlace) -> Iterable[tuple[Rank, str]]:
    """Unrated findings on an operator of a layer, behind what the layer itself shows."""
    for finding in view.about(place):
        rated = finding.rated or finding.severity == BORDERLINE
        if finding.target.kind == "cell" and finding.unit == "nats" and finding.nats is not None and not rated:
            words = f"{finding.component}: {finding.statement}"
            yield (1, words) if finding.nats >= COSTLY * view.median else (2, words)


def _by_avalanches(view: _View, place: NamedPlace) -> Iterable[tuple[Rank, str]]:
    for point in view.section.avalanche_points:
        if not isinstance(place, int) or not point.start <= place <= point.end:
            continue
        loss, metric = point.degradation.value, metric_name(view.section.layers[0].metric)
        lost = "" if loss is None else f": {percent(loss)} of the {metric} lost"
        words = f"avalanche point {point.layer_range}{lost}"
        if not point.decided:
            yield 2, f"borderline {words}"
        elif point.common[0] <= place <= point.common[1]:
            yield 1, words
        else:
            yield 2, f"next to the core of {words}"


def _by_effect(view: _View, place: NamedPlace, row: Effect) -> Iterable[tuple[Rank, str]]:
    """What noise in the place alone costs: a significant loss, and nats beside those of the median layer."""
    moderate, high, _ = BANDS["degradation"].limits
    known = any(finding.unit == "share" and finding.target.kind in ("layer", "place") for finding in view.about(place))
    if row.loss is not None and row.degradation is not None and row.loss >= moderate and not known:
        words = f"noise in it alone costs {percent(row.loss)} of the {metric_name(row.metric)}"
        yield (1, words) if row.degradation.above(high) else (2, words)
    if view.median and row.nats >= STANDS_OUT * view.median:
        times = f"{row.nats / view.median:.1f} x the median layer"
        verb = "moves" if row.injected else "is predicted to move"
        words = f"noise in it {verb} the output by {row.nats:.3g} nats per token, {times}"
        yield (1, words) if row.nats >= COSTLY * view.median else (2, words)


def _by_channels(view: _View, place: NamedPlace) -> Iterable[tuple[Rank, str]]:
    for name, info in view.captured(place):
        if info.nonfinite_channels:
            yield 1, f"{name}: {info.nonfinite_channels} channels are not finite"
        if info.operator == "linear" and info.band in ("HIGH", "CRITICAL"):
            count = counted(info.num_outliers, "outlier channel")
            yield 2, f"{name}: {count}, the largest {info.max_ratio:.0f} x the median"


def _priority(rank: Rank, evidence: Sequence[PlaceEvidence]) -> Priority:
    layers = tuple(one.place for one in evidence if isinstance(one.place, int))
    places = tuple(one.place for one in evidence if isinstance(one.place, str))
    precision = {str(one.place): _precision(rank, one.largest_activation) for one in evidence}
    limit = MAX_MAPE[rank]
    validation = "no layer-by-layer comparison needed: check the end-to-end score"
    if limit is not None:
        what = "every operator of these layers between the two machines" if rank == 1 else "the outputs of these layers"
        validation = f"compare {what}: MAPE below {100 * limit:g} %"
        if places:
            validation += f"; compare {' and '.join(places)} by sketch: no operator may diverge beyond round-off"
    return Priority(rank, layers, places, precision, validation, limit, tuple(evidence))


def _precision(rank: Rank, largest: float | None) -> str:
    """FP16 is more precise, but only suitable if the captured values stay far below 65504."""
    if rank == 3:
        return "INT8 or BF16"
    fits = largest is not None and largest < HEADROOM * LIMITS["fp16_maximum"]
    return "FP16" if rank == 1 and fits else "BF16"


def _commands(
    found: Diagnosis, priorities: Sequence[Priority], path: str, device: str, given: Mapping[str, str]
) -> Iterable[Command]:
    run = found.run
    asked = {} if run.command is None else run.command.options
    same = {name: asked[name] for name in ("prompt_field", "answer_field", "max_tokens", "revision") if name in asked}
    source = {} if run.data.source in NOT_FILES else {"data": run.data.source}
    first, second = (sorted(entry.layers) for entry in priorities[:2])
    whole = sorted(first + second)
    system = {"model": run.model.source, **source, **same, **given}
    system["dtype"] = run.conditions.dtype  # the same on both machines, whatever each would choose
    record = {**system, "full_layers": whole or None}
    here, there, both = "the reference machine", "the new machine", "either machine, with both records"
    yield Command(here, command_line(RecordOptions, {**record, "output": REFERENCE}))
    yield Command(there, command_line(RecordOptions, {**record, "device": device, "output": TARGET}))
    records = {"a": REFERENCE, "b": TARGET}
    outside = [place for entry in priorities[:2] for place in entry.places]
    rows = f"; for {' and '.join(outside)} see the rows of that place in {COMPARISON}"
    yield Command(
        f"{both}: everything{rows if outside else ''}",
        command_line(CompareOptions, {**records, "sensitivity": path, "output": COMPARISON}),
    )
    for layers, limit in ((first, MAX_MAPE[1]), (second, MAX_MAPE[2])):
        if layers:
            yield Command(both, command_line(CompareOptions, {**records, "layers": layers, "max_mape": limit}))
    broken = {"model": system["model"], "revision": system.get("revision"), "dtype": system["dtype"], "device": device}
    yield Command(f"{there}, where a comparison fails", command_line(LocateOptions, broken))
    tests = {**same, **given, "report": path, "run": True}
    yield Command("either machine: how the weakest places tolerate faults", command_line(FaultTestOptions, tests))
