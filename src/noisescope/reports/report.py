"""What every report can do: hold a typed value, read as its JSON form, and be drawn and saved in four formats."""

from __future__ import annotations

import functools
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

from noisescope.diagnosis.report import Diagnosis, Robustness
from noisescope.errors import InvalidInput, MissingExtra, unknown
from noisescope.jsonform import Json, to_json
from noisescope.reports.document import Document
from noisescope.reports.markdown import to_markdown
from noisescope.reports.reading import MADE, read_report, value_of
from noisescope.reports.sections import document_of
from noisescope.reports.values import DiagnosisReport

V = TypeVar("V")
FORMATS = ("json", "md", "html", "pdf")


class SavedReport(Mapping[str, Json], Generic[V]):
    """`value` is what was found, typed; the report itself reads as the JSON form of it.

    A subclass names its types in `kinds`, each by a key of its JSON that no other has, and draws them in `document`.
    """

    kinds: ClassVar[Mapping[str, type]]
    made: ClassVar[str] = MADE  # the command that writes such a report

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
        return to_markdown(self.document())

    def to_html(self) -> str:
        """One file that needs nothing else."""
        from noisescope.reports.html import to_html

        return to_html(self.document())

    def to_pdf(self) -> bytes:
        from noisescope.reports.pdf import to_pdf

        return to_pdf(self.document())

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
                    paths.append(_write(target / f"{name}.{form}", draw[form]()))
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
        return cls.checked(read_report(path), str(path))

    @classmethod
    def checked(cls, data: Json, where: str) -> Self:
        """A report from elsewhere: refused in one line where any part of it does not fit."""
        return cls(value_of(data, cls.kinds, where, made=cls.made))


def _write(path: Path, content: str | bytes) -> Path:
    """Whole or not at all: a reader never meets half a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return part.replace(path)


# The report of a diagnosis or of a robustness curve.


class Report(SavedReport[DiagnosisReport | Robustness]):
    """Reads as its JSON form: report["operator_analysis"]["softmax"]["degradation"]["value"].

    The typed value is `report.value`: report.value.operator_analysis["softmax"].degradation.value
    """

    kinds: ClassVar = {"executive_summary": DiagnosisReport, "robustness": Robustness}

    def __init__(self, value: Diagnosis | Robustness) -> None:
        super().__init__(DiagnosisReport.from_diagnosis(value) if isinstance(value, Diagnosis) else value)

    def __repr__(self) -> str:
        if isinstance(self.value, Robustness):
            return f"<Report: robustness at {len(self.value.robustness.levels)} noise levels>"
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

    def document(self) -> Document:
        return document_of(self.value)


def diagnosis_of(report: Report | Diagnosis) -> Diagnosis:
    """The diagnosis that a report holds; a report of anything else is refused."""
    return report if isinstance(report, Diagnosis) else report.diagnosis
