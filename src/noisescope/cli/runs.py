"""`noisescope runs list|show|resume`: what lies in a store."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.errors import InvalidInput

runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and resume runs.")
Folder = Annotated[Path, typer.Argument(help="A run's folder (the -o of its command).")]


@runs.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look, two folders deep.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Runs in a folder."""
    from noisescope.runs.store import FILE

    found = sorted(path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{FILE}"))
    rows = [{"folder": str(path), **facts(path)} for path in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        typer.echo(f"no runs in {folder.resolve()}")
    for row in rows:
        failed = f", {row['failed']} failed" if row["failed"] else ""
        typer.echo(f"{row['folder']}: {row['command']} of {row['model']}, {row['trials']} trials{failed}")


@runs.command("show")
def show_run(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What a run asked, what it has, what failed."""
    row = facts(folder, errors=True)
    if as_json:
        typer.echo(json.dumps(row, indent=1))
        return
    typer.echo(f"{row['command']} of {row['model']}, data: {row['data']}")
    for measure, count in row["measures"].items():
        typer.echo(f"  {measure}: {count} trials")
    typer.echo(f"  {row['seconds']:.1f} s measured")
    for error, count in row["errors"].items():
        typer.echo(f"  failed {count} x: {error}")


@runs.command("resume")
def resume_run(folder: Folder) -> None:
    """Go on with a run that was interrupted: the same command again."""
    from noisescope.cli.diagnose import run_diagnosis
    from noisescope.cli.robustness import run_robustness

    command = _about(folder).get("command")
    commands = {"diagnose": run_diagnosis, "robustness": run_robustness}
    if not command or command.get("name") not in commands:
        raise InvalidInput(
            f"{folder} was made from Python, not by a command: call the same function again with output={str(folder)!r}"
        )
    commands[command["name"]]({**command["options"], "output": str(folder)})


def facts(folder: Path, *, errors: bool = False) -> dict[str, Any]:
    """A store in numbers."""
    from noisescope.runs.store import Store

    with Store(folder, create=False) as store:
        about = store.about()
        asked = about.get("asked", {})
        failures = Counter(result.error for result in store.values() if result.failed)
        row: dict[str, Any] = {
            "command": (about.get("command") or {}).get("name", "a call from Python"),
            "model": asked.get("model", {}).get("source", "?"),
            "data": asked.get("data", {}).get("source", "?"),
            "trials": len(store),
            "failed": sum(failures.values()),
            "seconds": sum(store.seconds.values()),
            "measures": store.measures(),
        }
        if errors:
            row["errors"] = dict(failures)
        return row


def _about(folder: Path) -> dict[str, Any]:
    from noisescope.runs.store import Store

    with Store(folder, create=False) as store:
        return store.about()
