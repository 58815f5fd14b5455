"""The report of a diagnosis or of a robustness curve, and the JSON Schema of both."""

from __future__ import annotations

from typing import ClassVar

from noisescope.diagnosis.report import SCHEMA_VERSION, Diagnosis, Robustness
from noisescope.errors import InvalidInput
from noisescope.jsonform import Json, schema_of
from noisescope.reports.document import Document
from noisescope.reports.reading import read_report
from noisescope.reports.saved import FORMATS, SavedReport
from noisescope.reports.sections import document_of
from noisescope.reports.values import DiagnosisReport

__all__ = ["FORMATS", "SCHEMA_VERSION", "Report", "read_report", "schema"]


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

    def document(self) -> Document:
        return document_of(self.value)


def schema() -> dict[str, Json]:
    """The JSON Schema of report.json: a diagnosis, or accuracy at noise levels. Derived from their types."""
    title = "noisescope report"
    kinds = [schema_of(kind, title=title) for kind in (DiagnosisReport, Robustness)]
    definitions = {name: part for kind in kinds for name, part in kind["$defs"].items()}
    for kind in kinds:
        named = definitions[kind["$ref"].removeprefix("#/$defs/")]
        named["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": kinds[0]["$schema"],
        "title": title,
        "anyOf": [{"$ref": kind["$ref"]} for kind in kinds],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
