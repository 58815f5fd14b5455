"""Reports drawn: figures, JUnit XML, the JSON Schema. No torch here."""

from __future__ import annotations

from pathlib import Path

from noisescope.reports.document import Document
from noisescope.reports.junit import write_junit as write_junit
from noisescope.reports.schema import schema as schema


def save_figures(document: Document, folder: Path) -> list[Path]:
    """The charts of a report as PNG and SVG; matplotlib is loaded here and not before."""
    from noisescope.reports.figures import save_figures as save

    return save(document, folder)
