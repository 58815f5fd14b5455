"""Reports drawn: figures, JUnit XML, the JSON Schema. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from noisescope.jsonform import to_json
from noisescope.reports import junit
from noisescope.reports.document import Document
from noisescope.reports.junit import Checked, cases_of
from noisescope.reports.schema import schema as schema


def as_json(value: object) -> str:
    """A result as JSON text, as `--json` prints it."""
    return json.dumps(to_json(value), indent=1) + "\n"


def write_junit(
    path: Path, suite: str, rows: Sequence[Checked], *, seconds: Sequence[float] | float, summary: str = ""
) -> Path:
    """Checks as JUnit XML, with what each took; `summary` where the rows alone do not decide the verdict."""
    each = [seconds] * len(rows) if isinstance(seconds, float) else seconds
    return junit.write_junit(path, suite, cases_of(rows, each), summary)


def save_figures(document: Document, folder: Path) -> list[Path]:
    """The charts of a report as PNG and SVG; matplotlib is loaded here and not before."""
    from noisescope.reports.figures import save_figures as save

    return save(document, folder)
