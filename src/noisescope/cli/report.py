"""`noisescope report RUN`: draw a stored report again. Needs neither the model nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescope.cli.common import names
from noisescope.errors import InvalidInput

if TYPE_CHECKING:
    from noisescope.reports.report import Report


def draw_report(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run's folder, or a report.json.", show_default=False)
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="Any of json,md,html,pdf.")] = "json,md,html,pdf",
    figures: Annotated[bool, typer.Option("--figures", help="Charts as PNG and SVG, too.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder. Default: the run's own.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of report.json and stop.")] = False,
) -> None:
    """Draw a run's report again.

    As JSON, Markdown, HTML, PDF and figures.

    \b
    noisescope report noisescope-demo
    noisescope report noisescope-demo --format html -o pages
    noisescope report out/report.json --figures
    noisescope report --schema
    """
    from noisescope.reports.schema import schema as schema_of_reports

    if schema:
        typer.echo(json.dumps(schema_of_reports(), indent=1))
        return
    if run is None:
        raise InvalidInput("RUN is missing: give a run's folder or a report.json (`noisescope runs list` shows some)")
    report = load_report(run)
    target = output or (run if run.is_dir() else run.parent)
    paths = report.save(target, formats=names(formats) or ())
    if figures:
        from noisescope.reports.figures import save_figures

        paths += save_figures(report.document(), target / "figures")
    for path in paths:
        typer.echo(str(path))


def load_report(run: Path) -> Report:
    """The report of a run's folder, or of a report.json."""
    from noisescope.reports.report import Report

    return stored_report(run) or Report.load(run)


def stored_report(run: Path) -> Report | None:
    """The report that a finished run keeps in its store, if there is one."""
    from noisescope.reports.phases import PhasesReport
    from noisescope.reports.report import Report
    from noisescope.runs.store import FILE, Store

    if not (run / FILE).exists():
        return None
    with Store(run, create=False) as store:
        about = store.about()
    if "report" not in about and not (run / "report.json").exists():
        raise InvalidInput(f"the run in {run} is not finished, so there is no report yet: noisescope runs resume {run}")
    if "report" not in about:
        return None
    kind = PhasesReport if "hypotheses" in about["report"] else Report
    return kind.checked(about["report"], str(run))
