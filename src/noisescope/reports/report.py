"""A report: one JSON value, schema versioned, with what may differ between identical runs under `run` alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput, MissingExtra, unknown
from noisescope.options.choices import REPORT_FORMATS
from noisescope.reports.document import Document
from noisescope.reports.markdown import to_markdown
from noisescope.reports.sections import document_of

SCHEMA_VERSION = 1


class Report(Mapping[str, Any]):
    """Reads as the dictionary it is: report["operator_analysis"]["softmax"]["degradation"]."""

    parts: tuple[str, ...] = ("run", "could_not_see")  # what must be there
    one_of: tuple[str, ...] = ("executive_summary", "robustness")

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        summary = self.data.get("executive_summary") or {}
        return f"<Report: {summary.get('overall_risk_level', ', '.join(self.data))}>"

    def to_json(self) -> str:
        return json.dumps(self.data, indent=1, allow_nan=False) + "\n"

    def document(self) -> Document:
        """Laid out for reading; the three readable forms draw this."""
        return document_of(self.data)

    def to_markdown(self) -> str:
        return to_markdown(self.document())

    def to_html(self) -> str:
        """One file that needs nothing else."""
        from noisescope.reports.html import to_html

        return to_html(self.document())

    def to_pdf(self) -> bytes:
        from noisescope.reports.pdf import to_pdf

        return to_pdf(self.document())

    def same_as(self, other: Mapping[str, Any]) -> bool:
        """Whether two reports say the same, whenever and wherever they were made."""
        return {k: v for k, v in self.items() if k != "run"} == {k: v for k, v in other.items() if k != "run"}

    def save(self, folder: str | Path, *, name: str = "report", formats: Iterable[str] | None = None) -> list[Path]:
        """Write report.json, .md, .html and .pdf (or those of `formats`) into a folder; the paths.

        Without `formats` a PDF that this machine can't draw is left out with a warning: the numbers are in the others.
        """
        wanted = tuple(dict.fromkeys(REPORT_FORMATS if formats is None else formats))
        if not wanted:
            raise InvalidInput(f"no format is left: choose from {', '.join(REPORT_FORMATS)}")
        for form in wanted:
            if form not in REPORT_FORMATS:
                raise unknown("report format", form, REPORT_FORMATS)
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
    def load(cls, path: str | Path) -> Report:
        """From a report.json, or from the folder that holds one."""
        return cls.checked(read_report(path), str(path))

    @classmethod
    def checked(cls, data: Any, where: str) -> Report:
        """A report from elsewhere: refused where this version can't draw it."""
        if not isinstance(data, dict) or "schema_version" not in data:
            raise InvalidInput(f"{where} is JSON, but no report of noisescope (it has no schema_version)")
        if data["schema_version"] != SCHEMA_VERSION:
            came = data["schema_version"]
            raise InvalidInput(
                f"{where} is a report of schema version {came!r}, this noisescope draws {SCHEMA_VERSION}"
            )
        missing = [key for key in cls.parts if key not in data]
        if missing or (cls.one_of and not set(cls.one_of) & data.keys()):
            raise InvalidInput(f"{where} is not a whole report: {', '.join(missing) or cls.one_of[0]} is missing")
        report = cls(data)
        try:
            report.document()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{where} is not a whole report: {type(error).__name__} {error}") from error
        return report


def read_report(path: str | Path) -> Any:
    """What a report.json holds, or that of a folder: of any kind, not looked at yet."""
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no report at {path}: give a report.json or the folder that holds it") from None
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{file} is no report: {error}. Give the report.json that `noisescope diagnose MODEL -o DIR` writes"
        ) from None


def _write(path: Path, content: str | bytes) -> Path:
    """Whole or not at all: a reader never meets half a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return part.replace(path)
