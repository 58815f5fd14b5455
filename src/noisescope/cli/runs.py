"""`noisescope report RUN` and `noisescope runs ...`: stored runs drawn, listed, resumed, compared. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer

from noisescope import api
from noisescope.cli.command_builder import COMMANDS, add_command, carry_out
from noisescope.cli.output import print_each, say, say_line, write_table
from noisescope.errors import InvalidInput
from noisescope.options.base import WIDEN_TRUST, unlike_default
from noisescope.options.experiment_and_run_commands import (
    CheckRunOptions,
    CompareRunsOptions,
    DrawOptions,
    ListOptions,
    ResumeOptions,
    ShowOptions,
)
from noisescope.options.fields import options_of
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
    noisescope report out --summary --format md            one page, for a pull request
    noisescope report out --step-summary                   in a GitHub Actions job
    noisescope report out --csv channels.csv --table channels
    noisescope report --schema
    """
    if options.schema:
        say(json.dumps(api.reports.schema(), indent=1))
        return
    report = api.reports.load_any_report(options.run)
    if options.csv is not None:
        print_each(write_table(report, options.csv, options.table), "")
        return
    target = options.output or (options.run if options.run.is_dir() else options.run.parent)
    if options.step_summary:
        say_line(f"appended to {api.reports.append_step_summary(report)}", err=True)
    if options.summary:
        paths = api.reports.save_summary(report, target, options.format)
    else:
        paths = [] if options.step_summary else report.save(target, formats=options.format)
    if options.figures:
        paths += api.reports.save_figures(report.document(), target)
    print_each(paths, "")


def list_runs(options: ListOptions) -> None:
    """Runs in a folder."""
    rows, unreadable = api.reports.find_runs(options.folder)
    if options.json:
        say(json.dumps(rows, indent=1))
        return
    if not rows:
        say_line(f"no runs in {options.folder.resolve()}")
    for problem in unreadable:
        say_line(f"can't be read: {problem}", err=True)
    for row in rows:
        count = row["trials"]
        failed = f", {row['failed']} failed" if row["failed"] else ""
        trials = "" if row["gates"] and not count else f", {count} trial{'s' * (count != 1)}{failed}"
        say_line(f"{row['folder']}: {row['command']} of {row['model']}{trials}; {row['state']}")


def show_run(options: ShowOptions) -> None:
    """What a run asked, what it has, what failed."""
    row = api.reports.run_facts(options.folder, whole=True)
    if options.json:
        say(json.dumps(row, indent=1))
        return
    say_line(f"{row['command']} of {row['model']}, data: {row['data']}")
    say_line(row["state"])
    for measure, count in row["measures"].items():
        say_line(f"  {measure}: {api.reports.counted(count, 'trial')}")
    say_line(f"  {row['seconds']:.1f} s measured")
    for error, count in row["errors"].items():
        say_line(f"  failed {count} x: {error}")
    say_line("settings")
    for name, value in row["settings"].items():
        say_line(f"  {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


def check_run(options: CheckRunOptions) -> None:
    """Verify the checksum of everything a run stored.

    Exit code 1 where something is damaged. Nothing is changed: resuming the run drops damaged trials and measures them
    again.

    \b
    noisescope runs check out
    """
    found = api.reports.check_run(options.folder)
    if options.json:
        say(api.reports.as_json(found), nl=False)
    else:
        say_line(f"{found.trials} trials, {found.damaged} damaged")
        if found.damaged_gates:
            say_line(f"{found.damaged_gates} gate verdicts damaged: they are left out of the history")
        for name in found.damaged_notes:
            say_line(f"damaged: {name!r}, written anew when the same command runs again")
        if found.structure != "ok":
            say_line(f"damaged: pages or indexes of {options.folder / api.reports.FILE} ({found.structure})")
        if not found.sound:
            say_line(f"measure what is damaged again: noisescope runs resume {options.folder}")
    if not found.sound:
        raise typer.Exit(1)


def resume_run(options: ResumeOptions) -> None:
    """Go on with a run that was interrupted: the same command again.

    Its model and options are printed first: they are those of the folder, wherever it came from. What widens trust is
    never stored, so it has to be given again.

    \b
    noisescope runs resume out
    noisescope runs resume out --trust-remote-code
    """
    command, fingerprint = api.reports.stored_command(options.folder)
    cls, run = (None, None) if command is None else COMMANDS.get(command.name, (None, None))
    if command is None or cls is None or run is None or not issubclass(cls, (ExecutionOptions, DemoOptions)):
        raise InvalidInput(
            f"{options.folder} was made from Python, not by a command: call the same function again with "
            f"output={str(options.folder)!r}"
        )
    given = {name: value for name, value in options.pick(*WIDEN_TRUST).items() if value}
    known = options_of(cls, "command")
    for name in given:
        if name not in known:
            raise InvalidInput(f"{options_of(ResumeOptions)[name].flag} is no option of noisescope {cls.command}")
    left_out = [name for name in command.again if name in known and name not in given]
    found = cls.from_stored(command.options, output=options.folder, **given)
    say_line(f"resuming {options.folder}: noisescope {cls.command}", err=True)
    for name, value in unlike_default(found).items():
        say_line(f"  {name}: {_shown(name, value)}", err=True)
    _refuse_another_place(command.options.get("model"))
    for name in left_out:
        if name in options_of(ResumeOptions):
            raise InvalidInput(
                f"this run was started with {known[name].flag}, which is never stored: if you trust its model and "
                f"folder, give it again: noisescope runs resume {options.folder} {known[name].flag}"
            )
        say_line(f"not repeated: {known[name].flag} (it writes outside the run's folder)", err=True)
    assert isinstance(found, (ExecutionOptions, DemoOptions))
    shown = options.pick("quiet", "verbose")
    carry_out(run, dataclasses.replace(found, resumes=fingerprint, **shown))


def _shown(name: str, value: object) -> str:
    """A value from a store for a terminal: control characters as escapes, and where a model's path leads."""
    real = Path(str(value)).resolve() if name == "model" and Path(str(value)).is_absolute() else None
    leads = "" if real is None or str(real) == str(value) else f" (leads to {json.dumps(str(real))})"
    return json.dumps(value, default=str) + leads


def _refuse_another_place(model: object) -> None:
    """A stored model is an absolute path or a name. A name that is a folder here is not what the run had."""
    if isinstance(model, str) and model != "demo" and not Path(model).is_absolute() and Path(model).exists():
        raise InvalidInput(
            f"the run's model was {json.dumps(model)} by name, and {Path(model).absolute()} is a file or folder of "
            "that name: resume from another folder, or run the whole command again with the model you mean"
        )


def compare_two_runs(options: CompareRunsOptions) -> None:
    """What changed from one run to another: a new checkpoint, another dtype, another device.

    \b
    noisescope runs compare out/monday out/friday
    noisescope runs compare out/float32 out/bfloat16 -o compared --format md,html

    Every injection that both ran is compared, sample by sample where the data are the same. Settings that both need in
    common: --noise-scale, --operators, --window; and --data, --samples for pairs.
    """
    comparison = api.reports.compare_runs(options.a, options.b)
    paths = [] if options.output is None else comparison.save(options.output, name="comparison", formats=options.format)
    paths += write_table(comparison, options.csv)
    if options.json:
        say(comparison.to_json(), nl=False)
        return
    found = comparison.changes
    words = api.reports.run_changes
    say(f"A  {words.run_line(found.a)}\nB  {words.run_line(found.b)}")
    say(f"asked differently: {', '.join(map(words.differing, found.differs)) or 'nothing'}")
    say(f"\nverdict: {words.verdict_line(found)}")
    for row in words.largest_changes(found.rows):
        say(f"  {words.change_line(row)}")
    print_each(found.notes, "note: ")
    print_each(paths)


add_command(runs, list_runs)
add_command(runs, show_run)
add_command(runs, check_run)
add_command(runs, resume_run)
add_command(runs, compare_two_runs)
