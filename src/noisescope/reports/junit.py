"""Checks as JUnit XML, which GitHub, GitLab and Jenkins show beside a build."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from noisescope.atomic_write import write_file
from noisescope.errors import InvalidInput, unknown
from noisescope.findings.pass_fail import VERDICTS, Verdict, headline, overall
from noisescope.text_escaping import visible


@dataclass(frozen=True)
class Case:
    """One check. What could not be decided is a skipped case: neither green nor red."""

    name: str
    verdict: Verdict
    message: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise unknown("verdict", self.verdict, VERDICTS)


def to_junit(suite: str, cases: Sequence[Case], summary: str = "") -> str:
    """One suite of cases; a case's message stands in its output, too, so that passing ones show their numbers.

    `summary` is the verdict in words where the cases alone do not decide it.
    """
    counts = {verdict: sum(case.verdict == verdict for case in cases) for verdict in VERDICTS}
    attributes = {
        "name": visible(suite),
        "tests": str(len(cases)),
        "failures": str(counts["fail"]),
        "skipped": str(counts["undecided"]),
        "errors": "0",
        "time": f"{sum(case.seconds for case in cases):.3f}",
    }
    root = ET.Element("testsuites")
    parent = ET.SubElement(root, "testsuite", attributes)
    for case in cases:
        naming = {"classname": visible(suite), "name": visible(case.name), "time": f"{case.seconds:.3f}"}
        element = ET.SubElement(parent, "testcase", naming)
        if case.verdict != "pass":
            kind = "failure" if case.verdict == "fail" else "skipped"
            ET.SubElement(element, kind, {"message": visible(case.message, keep="\n\t")})
        ET.SubElement(element, "system-out").text = visible(case.message, keep="\n\t")
    verdicts = [case.verdict for case in cases]
    ET.SubElement(parent, "system-out").text = visible(summary, keep="\n\t") or headline(overall(verdicts), verdicts)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_junit(path: Path, suite: str, cases: Sequence[Case], summary: str = "") -> Path:
    """The cases as a file; its path."""
    try:
        write_file(path, to_junit(suite, cases, summary))
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror or error}. Choose another with --junit") from error
    return path
