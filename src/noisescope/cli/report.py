"""`noisescope report RUN`: draw a stored report again. Needs neither the model nor torch."""

from __future__ import annotations

import json

import typer

from noisescope.options.stored import DrawOptions


def draw_report(asked: DrawOptions) -> None:
    """Draw a run's report again.

    As JSON, Markdown, HTML, PDF and figures.

    \b
    noisescope report noisescope-demo
    noisescope report noisescope-demo --format html -o pages
    noisescope report out/report.json --figures
    noisescope report --schema
    """
    from noisescope.api.drawing import save_figures, schema
    from noisescope.api.stored import any_report

    if asked.schema:
        typer.echo(json.dumps(schema(), indent=1))
        return
    report = any_report(asked.run)
    target = asked.output or (asked.run if asked.run.is_dir() else asked.run.parent)
    paths = report.save(target, formats=asked.format)
    if asked.figures:
        paths += save_figures(report.document(), target / "figures")
    for path in paths:
        typer.echo(str(path))
