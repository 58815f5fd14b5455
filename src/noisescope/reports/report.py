"""The report of a diagnosis or of a robustness curve."""

from __future__ import annotations

from typing import ClassVar

from noisescope.diagnosis.report import Diagnosis, Robustness
from noisescope.errors import InvalidInput
from noisescope.reports.document import Document
from noisescope.reports.reading import read_report as read_report
from noisescope.reports.saved import SavedReport
from noisescope.reports.sections import document_of
from noisescope.reports.values import DiagnosisReport


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
