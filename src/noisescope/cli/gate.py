"""`noisescope gate MODEL --baseline report.json`: a check for CI."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import replace
from typing import Any

import typer

from noisescope.cli import common
from noisescope.options.diagnosing import GateOptions


def gate_model(asked: GateOptions) -> None:
    """Fail where a model got worse than its baseline.

    For CI: exit code 1 where noise moves the outputs more than 20 % further than the baseline's, or costs more accuracy
    than it may. Both are decided with their intervals.

    \b
    noisescope diagnose path/to/model --data eval.jsonl -o baseline        once, for the baseline
    noisescope gate path/to/new --baseline baseline/report.json --data eval.jsonl --max-degradation 0.15
    noisescope gate path/to/new --baseline baseline/report.json --junit gate.xml --history gates
    noisescope gate --template github > .github/workflows/robustness.yml

    On the baseline's own samples all numbers are compared in pairs; others are refused without --other-samples, as is
    another architecture. Another dtype, device or attention path is said. A row that could have missed twice the limit
    is undecided, and says what it would have caught. Exit code 3 where none could be decided.
    """
    if asked.template is not None:
        folder = importlib.resources.files("noisescope.cli") / "ci"
        typer.echo((folder / f"{asked.template}.yml").read_text(encoding="utf-8"), nl=False)
        return
    from noisescope.api.drawing import write_junit
    from noisescope.api.guarding import gate, keep
    from noisescope.api.loading import load_subject
    from noisescope.cli.progress import Shown

    with common.plain_warnings():
        subject = load_subject(asked)
        with Shown() as progress:
            result = gate(subject, options=replace(asked, progress=progress))
    paths = [] if asked.junit is None else [write_junit(asked.junit, "noisescope gate", _timed(result))]
    paths += [] if asked.history is None else keep(result, asked.history)
    if asked.json:
        typer.echo(json.dumps(result, indent=1))
    else:
        say_verdict(result)
        for path in paths:
            typer.echo(f"  {path}")
    common.leave(result["verdict"], asked)


def _timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks for JUnit: one measurement serves all of them, so each has its share of the time."""
    from noisescope.api.words import checks

    rows = checks(result)
    return [{**row, "seconds": result["seconds"] / len(rows)} for row in rows]


def say_verdict(result: dict[str, Any]) -> None:
    """The verdict, every check with its numbers, and the accuracy with its power."""
    from noisescope.api.words import checks, headline, samples_told

    before = f"{result['baseline']['model']} ({result['baseline']['finished']})"
    rows = checks(result)
    typer.echo(f"{result['verdict']}: {result['model']} against {before}: {samples_told(result['n'])}")
    typer.echo(f"{headline(result['verdict'], (row['verdict'] for row in rows))}\n")
    for row in rows:
        typer.echo(f"  {row['verdict']:<9}  {row['name']}: {row['message']}")
    typer.echo("\naccuracy, which does not decide:")
    for row in result["accuracy"]:
        where = "clean" if row["under_noise_in"] == "clean" else f"noise in {row['under_noise_in']}"
        sides = " -> ".join(f"{100 * row[side]['value']:.1f} %" for side in ("baseline", "candidate"))
        change, least = row["difference"], row["smallest_detectable"]
        ends = ", ".join("..." if change[end] is None else f"{100 * change[end]:+.1f}" for end in ("low", "high"))
        power = "no drop" if least is None else f"a drop of {100 * least:.1f} points"
        typer.echo(f"  {where}: {sides} ({100 * change['value']:+.1f} points [{ends}]); {power} would have shown")
