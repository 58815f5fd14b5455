"""`noisescope report RUN`: draw a stored report again. Needs neither the model nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    report = any_report(run)
    target = output or (run if run.is_dir() else run.parent)
    paths = report.save(target, formats=names(formats) or ())
    if figures:
        from noisescope.reports.figures import save_figures

        paths += save_figures(report.document(), target / "figures")
    for path in paths:
        typer.echo(str(path))


def load_report(run: Path) -> Report:
    """The report of a diagnosis, by its run's folder or its report.json."""
    from noisescope.reports.report import Report

    found = any_report(run)
    if type(found) is not Report:
        raise InvalidInput(f"{run} holds {found!r}, and this needs the report of a diagnosis (noisescope diagnose)")
    return found


def any_report(run: Path) -> Report:
    """What a run's folder or a report.json holds: a report, an experiment or a comparison."""
    from noisescope.reports.changes import Comparison
    from noisescope.reports.phases import PhasesReport
    from noisescope.reports.report import Report, read_report

    found = stored_report(run) or read_report(run)
    kinds = {"hypotheses": PhasesReport, "comparison": Comparison}
    kind = next((kind for key, kind in kinds.items() if isinstance(found, dict) and key in found), Report)
    return kind.checked(found, str(run))


def stored_report(run: Path) -> dict[str, Any] | None:
    """What a finished run keeps in its store, if there is one."""
    from noisescope.runs.store import FILE, Store

    if not (run / FILE).exists():
        return None
    with Store(run, create=False) as store:
        found: dict[str, Any] | None = store.fact("report")
    if found is None and not (run / "report.json").exists():
        raise InvalidInput(f"the run in {run} is not finished, so there is no report yet: noisescope runs resume {run}")
    return found
