"""Options of the commands about stored runs and reports: report, runs list, show, resume, compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from noisescope.options.choices import REPORT_FORMATS
from noisescope.options.fields import argument, changed, option
from noisescope.options.groups import PrintingOptions
from noisescope.options.values import CommandOptions


@dataclass(frozen=True, kw_only=True)
class DrawOptions(CommandOptions):
    command: ClassVar[str] = "report"

    run: Path = argument(
        "RUN", "A run's folder or a report.json (`noisescope runs list` shows some).", surface="command"
    )
    format: tuple[str, ...] = option(
        REPORT_FORMATS,
        "Forms to write.",
        unit="LIST",
        choices=REPORT_FORMATS,
        word="report format",
        surface="command",
    )
    figures: bool = option(False, "Also write the charts as PNG and SVG, into figures/.", surface="command")
    output: Path | None = option(
        None, "Folder to write into.", unit="DIR", short="-o", default_text="the run's own", surface="command"
    )
    schema: bool = option(False, "Print the JSON Schema of report.json and stop.", stops=True, surface="command")


@dataclass(frozen=True, kw_only=True)
class ListOptions(PrintingOptions):
    command: ClassVar[str] = "runs list"

    folder: Path = argument(
        "DIR", "Where to look, two folders deep.", required=False, default=Path(), surface="command"
    )


@dataclass(frozen=True, kw_only=True)
class FolderOptions(CommandOptions):
    folder: Path = argument("RUN", "A run's folder (the -o of its command).", surface="command")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(FolderOptions, PrintingOptions):
    command: ClassVar[str] = "runs show"


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(FolderOptions):
    command: ClassVar[str] = "runs resume"


@dataclass(frozen=True, kw_only=True)
class CompareRunsOptions(PrintingOptions):
    command: ClassVar[str] = "runs compare"

    a: Path = argument("A", "The folder of a run.", surface="command")
    b: Path = argument("B", "The folder of another: differences are B less A.", surface="command")
    output: Path | None = option(
        None, "Folder for comparison.json, .md, .html and .pdf.", unit="DIR", short="-o", surface="command"
    )
    format: tuple[str, ...] = changed(
        DrawOptions, "format", REPORT_FORMATS, help="With -o: any of json, md, html, pdf."
    )
