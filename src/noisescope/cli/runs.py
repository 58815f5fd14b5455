"""`noisescope report RUN` and `noisescope runs ...`: stored runs drawn, listed, resumed, compared. Needs no torch."""

from __future__ import annotations

import json

import typer

from noisescope import api
from noisescope.cli.command_builder import COMMANDS, add_command
from noisescope.cli.output import print_each
from noisescope.cli.terminal import say
from noisescope.errors import InvalidInput
from noisescope.options.experiment_and_run_commands import (
    CompareRunsOptions,
    DrawOptions,
    ListOptions,
    ResumeOptions,
    ShowOptions,
)
from noisescope.options.sensitivity import DemoOptions
from noisescope.options.shared import ExecutionOptions

runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, resume and compare runs.")


def draw_report(options: DrawOptions) -> None:
    """Draw a run's report again.

    As JSON, Markdown, HTML, PDF and figures.

    \b
    noisescope report noisescope-demo
    noisescope report noisescope-demo --format html -o pages
    noisescope report out/report.json --figures
    noisescope report --schema
    """
    if options.schema:
        say(json.dumps(api.reports.schema(), indent=1))
        return
    report = api.reports.load_any_report(options.run)
    target = options.output or (options.run if options.run.is_dir() else options.run.parent)
    paths = report.save(target, formats=options.format)
    if options.figures:
        paths += api.reports.save_figures(report.document(), target / "figures")
    print_each(paths, "")


def list_runs(options: ListOptions) -> None:
    """Runs in a folder."""
    rows, unreadable = api.reports.find_runs(options.folder)
    if options.json:
        say(json.dumps(rows, indent=1))
        return
    if not rows:
        say(f"no runs in {options.folder.resolve()}")
    for problem in unreadable:
        say(f"can't be read: {problem}", err=True)
    for row in rows:
        failed = f", {row['failed']} failed" if row["failed"] else ""
        trials = "" if row["gates"] and not row["trials"] else f", {row['trials']} trials{failed}"
        say(f"{row['folder']}: {row['command']} of {row['model']}{trials}; {row['state']}")


def show_run(options: ShowOptions) -> None:
    """What a run asked, what it has, what failed."""
    row = api.reports.run_facts(options.folder, whole=True)
    if options.json:
        say(json.dumps(row, indent=1))
        return
    say(f"{row['command']} of {row['model']}, data: {row['data']}")
    say(row["state"])
    for measure, count in row["measures"].items():
        say(f"  {measure}: {count} trials")
    say(f"  {row['seconds']:.1f} s measured")
    if row["damaged"]:
        say(f"  damaged: {row['damaged']} (failed the checksum; running again measures what is needed of them)")
    for error, count in row["errors"].items():
        say(f"  failed {count} x: {error}")
    say("settings")
    for name, value in row["settings"].items():
        say(f"  {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


def resume_run(options: ResumeOptions) -> None:
    """Go on with a run that was interrupted: the same command again."""
    command = api.reports.stored_command(options.folder) or {}
    cls, run = COMMANDS.get(command.get("name", ""), (None, None))
    if cls is None or run is None or not issubclass(cls, (ExecutionOptions, DemoOptions)):
        raise InvalidInput(
            f"{options.folder} was made from Python, not by a command: call the same function again with "
            f"output={str(options.folder)!r}"
        )
    run(cls.from_stored({**command["options"], "output": options.folder}))


def compare_two_runs(options: CompareRunsOptions) -> None:
    """What changed from one run to another: a new checkpoint, another dtype, another device.

    \b
    noisescope runs compare out/monday out/friday
    noisescope runs compare out/float32 out/bfloat16 -o compared --format md,html

    Every injection that both ran is compared, sample by sample where the data are the same. Settings that both need in
    common: --noise-scale, --operators, --window; and --data, --samples for pairs.
    """
    comparison = api.reports.compare_stored(options.a, options.b)
    paths = [] if options.output is None else comparison.save(options.output, name="comparison", formats=options.format)
    if options.json:
        say(comparison.to_json(), nl=False)
        return
    found = comparison.changes
    words = api.reports.run_changes
    say(f"A  {words.run_line(found.a)}\nB  {words.run_line(found.b)}")
    say(f"asked differently: {', '.join(row.what for row in found.differs) or 'nothing'}")
    say(f"\nverdict: {words.verdict_line(found)}")
    for row in words.largest_changes(found.rows):
        say(f"  {words.change_line(row)}")
    print_each(found.notes, "note: ")
    print_each(paths)


add_command(runs, list_runs)
add_command(runs, show_run)
add_command(runs, resume_run)
add_command(runs, compare_two_runs)
