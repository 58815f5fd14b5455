"""Reports: the value they hold, the one reader of report.json, its JSON Schema, and saving in four formats.

A report is data from outside. Its version is checked first; then every part must have the type it is written with
(jsonform.py), layers must be layers of the model, and an analysis of layers has all of them. No report is half
understood.
"""

from __future__ import annotations

import functools
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Literal, Self, TypeVar

from noisescope.atomic_write import write_file
from noisescope.comparison.roundoff import Roundoff
from noisescope.diagnosis.findings_check import CheckResult
from noisescope.diagnosis.report import SCHEMA_VERSION, Diagnosis, Robustness
from noisescope.errors import InvalidInput, MissingExtra, unknown
from noisescope.jsonform import Json, from_json, schema_of, to_json
from noisescope.plans.migration import MigrationPlan
from noisescope.plans.precision_results import PrecisionPlan
from noisescope.reports.document import Document
from noisescope.reports.markdown import to_markdown
from noisescope.sites import NamedPlace
from noisescope.tables import Sheet, Tabular
from noisescope.text_escaping import LONG, cut, one_line
from noisescope.untrusted_files import FileKind, parse_json, read_text

V = TypeVar("V")
FORMATS = ("json", "md", "html", "pdf")
SUMMARY_FORMATS = ("md", "html", "pdf")
TITLE = "noisescope report"
COMMAND = "noisescope diagnose"  # the command that writes a report, where no other is named
MOST_BLOCKS = 100_000
REPORT = FileKind("report", f"Give the report.json that `{COMMAND} MODEL -o DIR` writes, or the folder that holds it")


# -- the value


@dataclass(frozen=True)
class LocatedSuspect:
    """A site under suspicion. `channels` () means all of them; `details` depend on the method."""

    place: NamedPlace
    operator: str
    module: str
    tensor: str
    phase: str  # "backward", or empty for the forward
    occurrence: int
    channels: tuple[int, ...]
    period: int | None
    fault_class: str
    confidence: float
    evidence: str
    score: float
    details: Mapping[str, Json]
    rows: tuple[tuple[int, int], ...]  # (sequence, token)
    row_words: str
    class_confidence: float
    also: tuple[str, ...]  # other sites with the same fault


@dataclass(frozen=True)
class LocateSection:
    """What computes wrongly. `simulated` names a fault that was put in on purpose, with the elements it changed."""

    verdict: Literal["healthy", "faulty", "undecided"]
    method: str
    suspects: tuple[LocatedSuspect, ...]
    smallest_visible: Mapping[str, Json]
    forwards: float
    checked: int
    notes: tuple[str, ...]
    unseen: tuple[str, ...]
    simulated: str | None
    elements_changed: int | None
    headline: str  # the verdict with what it is worth
    coverage: Mapping[str, Json]  # what ran and what was judged

    @classmethod
    def of(
        cls, verdict: Mapping[str, Json], *, simulated: str | None = None, elements_changed: int | None = None
    ) -> LocateSection:
        """From the JSON form of a locator's verdict."""
        return from_json(cls, {**verdict, "simulated": simulated, "elements_changed": elements_changed}, "locate")


@dataclass(frozen=True, kw_only=True)
class DiagnosisReport(Diagnosis):
    """Everything a diagnosis found, and what was added to it."""

    migration_plan: MigrationPlan | None = None
    precision_plan: PrecisionPlan | None = None
    check: CheckResult | None = None
    locate: LocateSection | None = None

    @classmethod
    def from_diagnosis(cls, found: Diagnosis) -> DiagnosisReport:
        return found if isinstance(found, cls) else cls(**vars(found))


# -- saving


def drawn(document: Document, form: str) -> str | bytes:
    """A document as md, html or pdf; what draws it is loaded here and not before."""
    if form == "md":
        return to_markdown(document)
    if form == "html":
        from noisescope.reports.html import to_html

        return to_html(document)
    from noisescope.reports.pdf import to_pdf

    return to_pdf(document)


class SavedReport(Mapping[str, Json], Tabular, Generic[V]):
    """`value` is what was found, typed; the report itself reads as the JSON form of it.

    A subclass names its types in `kinds`, each by a key of its JSON that no other has, and draws them in `document`.
    """

    kinds: ClassVar[Mapping[str, type]]
    command: ClassVar[str] = COMMAND  # the command that writes such a report

    def __init__(self, value: V) -> None:
        self.value = value

    @abstractmethod
    def document(self) -> Document:
        """Laid out for reading; the three readable forms draw this."""

    @functools.cached_property
    def data(self) -> dict[str, Json]:
        """The JSON form."""
        found: dict[str, Json] = to_json(self.value)
        return found

    def __getitem__(self, key: str) -> Json:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def to_json(self) -> str:
        return json.dumps(self.data, indent=1, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        return str(drawn(self.document(), "md"))

    def to_html(self) -> str:
        """One file that needs nothing else."""
        return str(drawn(self.document(), "html"))

    def to_pdf(self) -> bytes:
        found = drawn(self.document(), "pdf")
        assert isinstance(found, bytes)
        return found

    def save(self, folder: str | Path, *, name: str = "report", formats: Iterable[str] | None = None) -> list[Path]:
        """Write report.json, .md, .html and .pdf (or those of `formats`) into a folder; the paths.

        Without `formats` a PDF that this machine can't draw is left out with a warning: the numbers are in the others.
        """
        wanted = tuple(dict.fromkeys(FORMATS if formats is None else formats))
        if not wanted:
            raise InvalidInput(f"no format is left: choose from {', '.join(FORMATS)}")
        for form in wanted:
            if form not in FORMATS:
                raise unknown("report format", form, FORMATS)
        target = Path(folder)
        draw: dict[str, Callable[[], str | bytes]]
        draw = {"json": self.to_json, "md": self.to_markdown, "html": self.to_html, "pdf": self.to_pdf}
        try:
            target.mkdir(parents=True, exist_ok=True)
            paths = []
            for form in wanted:
                try:
                    paths.append(write_file(target / f"{name}.{form}", draw[form]()))
                except MissingExtra as missing:
                    if formats is not None:
                        raise
                    warnings.warn(f"no {name}.{form} was written: {missing}", stacklevel=2)
            return paths
        except OSError as error:
            raise InvalidInput(
                f"can't write into {folder}: {error.strerror or error}. Choose another with -o"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a report.json, or from the folder that holds one."""
        return cls.from_data(read_report(path), str(path))

    @classmethod
    def from_data(cls, data: Json, where: str) -> Self:
        """A report from elsewhere: refused in one line where any part of it does not fit."""
        return cls(read_value(data, cls.kinds, where, command=cls.command))


class Report(SavedReport[DiagnosisReport | Robustness | Roundoff]):
    """Reads as its JSON form: report["operator_analysis"]["softmax"]["degradation"]["value"].

    The typed value is `report.value`: report.value.operator_analysis["softmax"].degradation.value
    """

    kinds: ClassVar = {"executive_summary": DiagnosisReport, "robustness": Robustness, "roundoff": Roundoff}

    def __init__(self, value: Diagnosis | Robustness | Roundoff) -> None:
        super().__init__(DiagnosisReport.from_diagnosis(value) if isinstance(value, Diagnosis) else value)

    def __repr__(self) -> str:
        if isinstance(self.value, Robustness):
            return f"<Report: robustness at {len(self.value.robustness.levels)} noise levels>"
        if isinstance(self.value, Roundoff):
            return f"<Report: round-off in {self.value.roundoff.band.dtype}>"
        return f"<Report: {self.value.executive_summary.overall_risk_level}>"

    @property
    def diagnosis(self) -> DiagnosisReport:
        """The value where it is a diagnosis; a robustness curve is refused."""
        if isinstance(self.value, DiagnosisReport):
            return self.value
        raise InvalidInput(f"{self!r} is no diagnosis: give the report of `noisescope diagnose`")

    @property
    def robustness(self) -> Robustness:
        """The value where it is a robustness curve; a diagnosis is refused."""
        if isinstance(self.value, Robustness):
            return self.value
        raise InvalidInput(f"{self!r} is no robustness curve: give the report of `noisescope robustness`")

    @property
    def roundoff(self) -> Roundoff:
        """The value where it is of round-off; others are refused."""
        if isinstance(self.value, Roundoff):
            return self.value
        raise InvalidInput(f"{self!r} has no round-off band: give the report of `noisescope robustness --rounding`")

    def document(self) -> Document:
        from noisescope.reports.report_document import document_of

        return document_of(self.value)

    def sheet(self) -> Sheet:
        from noisescope.reports.report_tables import sheet_of

        return sheet_of(self.value)

    def metrics(self) -> dict[str, float]:
        """The report as one flat dictionary, for any experiment tracker; what was not measured is left out.

        The same report always has the same keys: "operator/softmax/kl", "layer/3/kl", "risk_score" ... An estimate
        has three: "degradation", "degradation_low" and "degradation_high". No name is a folder of another.
        """
        from noisescope.reports.report_tables import metrics_of

        return metrics_of(self.value)


def diagnosis_of(report: Report | Diagnosis) -> Diagnosis:
    """The diagnosis that a report holds; a report of anything else is refused."""
    return report if isinstance(report, Diagnosis) else report.diagnosis


# -- reading


def read_report(path: str | Path) -> Json:
    """What a report.json holds, or that of a folder: of any kind, not checked yet."""
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    return parse_json(read_text(file, REPORT), file, REPORT)


def read_value(data: Json, kinds: Mapping[str, type[V]], where: str, *, command: str = COMMAND) -> V:
    """The value that a report's JSON stands for. `kinds` are its possible types, by a key that only that one has."""
    if not isinstance(data, Mapping) or "schema_version" not in data:
        raise InvalidInput(f"{where} is JSON, but no report of noisescope (it has no schema_version)")
    found = data["schema_version"]
    if type(found) is not int or found != SCHEMA_VERSION:
        first = type(found) is int and found == 1
        release = (
            "noisescope 0.1 (report version 1)" if first else f"another noisescope (report version {cut(repr(found))})"
        )
        raise InvalidInput(
            f"{where} was written by {release}; this version reads {SCHEMA_VERSION}. Run `{command}` again "
            "to write a new one"
        )
    kind = next((kind for key, kind in kinds.items() if key in data), None)
    if kind is None:
        raise InvalidInput(f"{where} is not a whole report: it has no {' and no '.join(map(repr, kinds))}")
    try:
        value = from_json(kind, data, "report")
        if isinstance(value, DiagnosisReport):
            _check_layers(value)
    except InvalidInput as error:
        raise InvalidInput(f"{where} is not a whole report: {one_line(str(error), LONG)}") from None
    return value


def _check_layers(report: DiagnosisReport) -> None:
    """Every layer that a report names is one of its model's, and a layer analysis has a row for each."""
    blocks = report.run.model.blocks
    if not 0 < blocks <= MOST_BLOCKS:
        raise InvalidInput(f"report.run.model.blocks: 1 to {MOST_BLOCKS} blocks were expected, got {blocks}")
    for where, layers in _named_layers(report):
        if list(layers) != sorted(layers) or any(not 0 <= layer < blocks for layer in layers):
            raise InvalidInput(f"report.{where}: the model has layers 0 to {blocks - 1}, got {list(layers)[:8]}")
    rows = None if report.layer_analysis is None else [row.layer for row in report.layer_analysis.layers]
    if rows is not None and rows != list(range(blocks)):
        raise InvalidInput(
            f"report.layer_analysis.layers: a row for each of {blocks} layers was expected, got {rows[:8]}"
        )


def _named_layers(report: DiagnosisReport) -> Iterator[tuple[str, Iterable[int]]]:
    if section := report.layer_analysis:
        yield from (
            (f"layer_analysis.windows[{i}]", (w.start_layer, w.end_layer)) for i, w in enumerate(section.windows)
        )
        yield from ((f"layer_analysis.layers[{i}]", (row.layer,)) for i, row in enumerate(section.layers))
        yield from ((f"layer_analysis.map[{i}]", (row.layer,)) for i, row in enumerate(section.map))
        for i, point in enumerate(section.avalanche_points):
            yield f"layer_analysis.avalanche_points[{i}]", (point.start, point.end)
            yield f"layer_analysis.avalanche_points[{i}].common", point.common
        for i, rule in enumerate(section.point_rule_avalanches):
            yield f"layer_analysis.point_rule_avalanches[{i}]", (rule.start, rule.end)
    if report.channel_analysis:
        for name, channels in report.channel_analysis.per_layer.items():
            if isinstance(channels.layer, int):
                yield f"channel_analysis.per_layer.{name}", (channels.layer,)
    for i, finding in enumerate(report.findings):
        yield f"findings[{i}].target.layers", finding.target.layers
    for i, finding in enumerate(report.executive_summary.top_findings):
        yield f"executive_summary.top_findings[{i}].target.layers", finding.target.layers
    if report.format_scores:
        for i, module in enumerate(report.format_scores.modules):
            yield f"format_scores.modules[{i}].place", (module.place,)


def schema() -> dict[str, Json]:
    """A diagnosis, accuracy at noise levels, or what round-off does."""
    kinds = [schema_of(kind, title=TITLE) for kind in (DiagnosisReport, Robustness, Roundoff)]
    definitions = {name: part for kind in kinds for name, part in kind["$defs"].items()}
    for kind in kinds:
        named = definitions[kind["$ref"].removeprefix("#/$defs/")]
        named["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": kinds[0]["$schema"],
        "title": TITLE,
        "anyOf": [{"$ref": kind["$ref"]} for kind in kinds],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
