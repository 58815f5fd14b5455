"""`noisescope runs list|show|resume|compare`: what lies in a store, and what two stores say together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noisescope.cli.common import names
from noisescope.errors import InvalidInput

if TYPE_CHECKING:
    from noisescope.diagnosis.stored import StoredRun

runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, resume and compare runs.")
Folder = Annotated[Path, typer.Argument(help="A run's folder (the -o of its command).")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@runs.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look, two folders deep.")] = Path(), as_json: Json = False
) -> None:
    """Runs in a folder."""
    from noisescope.runs.store import FILE

    found = sorted(path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{FILE}"))
    rows, unreadable = [], []
    for path in found:
        try:
            rows.append({"folder": str(path), **facts(path)})
        except InvalidInput as error:  # one bad store must not hide the others
            unreadable.append(str(error))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        typer.echo(f"no runs in {folder.resolve()}")
    for problem in unreadable:
        typer.echo(f"can't be read: {problem}", err=True)
    for row in rows:
        failed = f", {row['failed']} failed" if row["failed"] else ""
        typer.echo(
            f"{row['folder']}: {row['command']} of {row['model']}, {row['trials']} trials{failed}; {row['state']}"
        )


@runs.command("show")
def show_run(folder: Folder, as_json: Json = False) -> None:
    """What a run asked, what it has, what failed."""
    row = facts(folder, whole=True)
    if as_json:
        typer.echo(json.dumps(row, indent=1))
        return
    typer.echo(f"{row['command']} of {row['model']}, data: {row['data']}")
    typer.echo(row["state"])
    for measure, count in row["measures"].items():
        typer.echo(f"  {measure}: {count} trials")
    typer.echo(f"  {row['seconds']:.1f} s measured")
    if row["damaged"]:
        typer.echo(f"  damaged: {row['damaged']} (failed the checksum; running again measures what is needed of them)")
    for error, count in row["errors"].items():
        typer.echo(f"  failed {count} x: {error}")
    typer.echo("settings")
    for name, value in row["settings"].items():
        typer.echo(f"  {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


@runs.command("resume")
def resume_run(folder: Folder) -> None:
    """Go on with a run that was interrupted: the same command again."""
    from noisescope.cli.demo import demonstrate
    from noisescope.cli.diagnose import run_diagnosis
    from noisescope.cli.experiment import run_phases
    from noisescope.cli.robustness import run_robustness
    from noisescope.runs.store import Store

    with Store(folder, create=False) as store:
        command = store.fact("command")
    commands = {"demo": demonstrate, "diagnose": run_diagnosis, "robustness": run_robustness}
    commands["experiment phases"] = run_phases
    if not command or command.get("name") not in commands:
        raise InvalidInput(
            f"{folder} was made from Python, not by a command: call the same function again with output={str(folder)!r}"
        )
    commands[command["name"]]({**command["options"], "output": str(folder)})


@runs.command("compare")
def compare_two_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The folder of another: differences are B less A.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for comparison.json, .md, .html and .pdf.")
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="With -o: any of json,md,html,pdf.")] = "json,md,html,pdf",
    as_json: Json = False,
) -> None:
    """What changed from one run to another: a new checkpoint, another dtype, another device.

    \b
    noisescope runs compare out/monday out/friday
    noisescope runs compare out/float32 out/bfloat16 -o compared --format md,html

    Every injection that both ran is compared, sample by sample where the data are the same. Settings that both need in
    common: --noise-scale, --operators, --window; and --data, --samples for pairs.
    """
    from noisescope.diagnosis.changes import compare_runs
    from noisescope.reports.changes import Comparison, change_line, largest, run_line, verdict_line

    comparison = Comparison(compare_runs(read_run(a), read_run(b)))
    paths = [] if output is None else comparison.save(output, name="comparison", formats=names(formats) or ())
    if as_json:
        typer.echo(comparison.to_json(), nl=False)
        return
    found = comparison.changes
    typer.echo(f"A  {run_line(found.a)}\nB  {run_line(found.b)}")
    typer.echo(f"asked differently: {', '.join(row.what for row in found.differs) or 'nothing'}")
    typer.echo(f"\nverdict: {verdict_line(found)}")
    for row in largest(found.rows):
        typer.echo(f"  {change_line(row)}")
    for note in found.notes:
        typer.echo(f"note: {note}")
    for path in paths:
        typer.echo(f"  {path}")


def read_run(folder: Path) -> StoredRun:
    """A store as the comparison needs it."""
    from noisescope.diagnosis.stored import stored_run
    from noisescope.runs.store import Store

    with Store(folder, create=False) as store:
        trials = [(json.loads(content), store[identity]) for identity, content in store.contents().items()]
        return stored_run(str(folder), store.fact("asked"), trials)


def facts(folder: Path, *, whole: bool = False) -> dict[str, Any]:
    """A store in numbers; the whole of it with its errors and settings."""
    from noisescope.runs.store import Store

    with Store(folder, create=False) as store:
        about = store.about()
        asked = about.get("asked", {})
        failures = Counter(result.error for result in store.values() if result.failed)
        row: dict[str, Any] = {
            "command": (about.get("command") or {}).get("name", "a call from Python"),
            "model": asked.get("model", {}).get("source", "?"),
            "data": asked.get("data", {}).get("source", "?"),
            "state": state(folder, about),
            "trials": len(store),
            "failed": sum(failures.values()),
            "damaged": store.damaged,
            "seconds": sum(store.seconds.values()),
            "measures": store.measures(),
        }
        if whole:
            row |= {"errors": dict(failures), "settings": {**asked.get("settings", {}), **_elsewhere(asked)}}
        return row


def state(folder: Path, about: dict[str, Any]) -> str:
    """ "complete", or how to go on. A report of an earlier question in the same folder does not count."""
    asked, run = about.get("asked", {}), about.get("report", {}).get("run", {})
    if run and all(run.get(name) == value for name, value in asked.items()):
        return "complete"
    if about.get("command"):
        return f"not finished: noisescope runs resume {folder}"
    return f"not finished: call the same function again with output={str(folder)!r}"


def _elsewhere(asked: dict[str, Any]) -> dict[str, Any]:
    """What was asked besides the settings of the diagnosis."""
    data, conditions = asked.get("data", {}), asked.get("conditions", {})
    rows = {"samples": data.get("samples"), "measure": data.get("measure"), "metric": asked.get("metric"),
            "dtype": conditions.get("dtype"), "device": asked.get("device")}  # fmt: skip
    return {name: value for name, value in rows.items() if value is not None}
