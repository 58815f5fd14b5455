"""What commands print: results as JSON or in words, tables, the first screen of a report.

Every text that a command shows goes through `say`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from noisescope import api
from noisescope.options.sensitivity import DemoOptions, DiagnoseOptions
from noisescope.text_escaping import aligned as aligned
from noisescope.text_escaping import one_line, visible

TYPED_PATHS = ("model", "data", "calibration", "output")
MOST_STEPS = 3
LONGEST_LINE = 1000  # characters
BEFORE_PRINTING: list[Callable[[], None]] = []  # called first: a progress bar makes room for text


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines of text. What a terminal would obey (colours, cursor, direction of writing) is shown instead."""
    for make_room in BEFORE_PRINTING:
        make_room()
    typer.echo(visible(str(text), keep="\n\t"), err=err, nl=nl)


def say_line(text: str, *, err: bool = False) -> None:
    """Print what another file says: a line however it was broken, and not a megabyte."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    say(indent + one_line(text, LONGEST_LINE), err=err)


def finish(
    report: Any, output: Path | None, show: Callable[[Any], None], *, as_json: bool, csv: Path | None = None
) -> None:
    """Write the report into the output folder; print it as JSON, or in words with the paths of its files."""
    paths = [] if output is None else report.save(output)
    paths += write_table(report, csv)
    if as_json:
        say(report.to_json(), nl=False)
        return
    show(report)
    print_each(paths)


def emit(result: Any, options: Any, show: Callable[[Any], None]) -> None:
    """Write a result to the files that the options name; print it as JSON, or in words with the path of its table."""
    text, paths = api.reports.as_json(result), list[Path]()
    if options.output is not None:
        paths = [api.reports.write_text(options.output, text)]
    paths += write_table(result, options.csv)
    if options.json:
        say(text, nl=False)
    else:
        show(result)
        print_each(paths)


def write_table(result: Any, path: Path | None, table: str | None = None) -> list[Path]:
    """Write a table of a result as CSV where a path is given; the paths written."""
    return [] if path is None else [api.reports.write_text(path, result.to_csv(table))]


def print_each(values: Iterable[object], prefix: str = "  ") -> None:
    """Every value on a line of its own, such as paths that were written."""
    for value in values:
        say(f"{prefix}{value}")


def print_summary(
    report: api.reports.Report, options: DiagnoseOptions, seconds_of: Callable[[Mapping[str, Any]], float]
) -> None:
    """The first screen: risk, top findings, next step, what it cost."""
    print_findings(report, options, seconds_of)
    print_cost(report)


def print_findings(
    report: api.reports.Report,
    options: DiagnoseOptions | DemoOptions,
    seconds_of: Callable[[Mapping[str, Any]], float] | None = None,
) -> None:
    """With commands that name files as they were typed: a report cuts absolute paths."""
    typed = {name: str(value) for name, value in vars(options).items() if name in TYPED_PATHS and value is not None}
    found = report.diagnosis
    summary, run = found.executive_summary, found.run
    say(f"{run.model.source}: {run.model.architecture}, {run.model.blocks} blocks, {run.device}")
    note = f" ({run.data.note})" if run.data.note else ""
    say(f"data: {run.data.source}, {run.data.samples} samples{note}")
    if run.settings.question is not None:
        say(f"number format: {run.settings.question.name}")
    say(f"\nrisk: {summary.overall_risk_level} - {summary.risk_meaning}")
    if summary.whole_model is not None:
        say(api.reports.cell_text.finding_lines(summary.whole_model)[0])
    for number, finding in enumerate(summary.top_findings, 1):
        first, *notes = api.reports.cell_text.finding_lines(finding)
        say(f"{number}. {first}")
        print_each(notes, "   ")
    if not summary.top_findings:
        say("nothing stands out")
    if note := api.reports.cell_text.ranking_note(summary.top_findings, run):
        say(f"\n{note}")
    say(f"\nnext: {summary.next_step}")
    for step in islice(api.reports.next_steps(found, typed, seconds_of), MOST_STEPS):
        say(f"\n{step.words}\n  {step.text}")


def print_cost(report: api.reports.Report) -> None:
    cost = report.value.run.cost
    say(
        f"\n{cost.trials_run_now} trials run now ({cost.trials} in the store), "
        f"{cost.forwards:.1f} forwards of the test data, {cost.seconds:.1f} s"
    )
