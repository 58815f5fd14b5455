"""`noisescope gate MODEL --baseline report.json`: a check for CI."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common
from noisescope.errors import unknown

TEMPLATES = ("github", "gitlab")


def _template(name: str | None) -> None:
    if name is None:
        return
    if name not in TEMPLATES:
        raise unknown("template", name, TEMPLATES)
    folder = importlib.resources.files("noisescope.cli") / "ci"
    typer.echo((folder / f"{name}.yml").read_text(encoding="utf-8"), nl=False)
    raise typer.Exit


def gate_model(
    model: common.Model,
    baseline: Annotated[Path, typer.Option("--baseline", help="The report.json of an earlier diagnosis.")],
    data: Annotated[Path | None, typer.Option("--data", help="Default: the baseline's, where it can be found.")] = None,
    max_degradation: Annotated[
        float, typer.Option("--max-degradation", help="The share of its accuracy that noise may cost.")
    ] = 0.15,
    max_worse: Annotated[
        float, typer.Option("--max-worse", help="How much worse than the baseline, as a share.")
    ] = 0.2,
    samples: common.Samples = 50,
    other_samples: Annotated[
        bool, typer.Option("--other-samples", help="The data hold other samples than the baseline's, of one source.")
    ] = False,
    effort: Annotated[
        str, typer.Option("--effort", help="screen: predict, and inject once; standard: inject into every operator.")
    ] = "screen",
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the checks there as JUnit XML.")] = None,
    history: Annotated[
        Path | None, typer.Option("--history", help="Folder that keeps every verdict, with a plot of the trend.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="The checkpoint's step, for the trend.")] = None,
    max_tokens: common.MaxTokens = 256,
    slice_samples: common.SliceSamples = 50,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    template: Annotated[
        str | None,
        typer.Option("--template", is_eager=True, callback=_template, help="Print a CI job and stop: github, gitlab."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
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
    is undecided, and says what it would have caught; where all are, so is the verdict, and the exit code is 0.
    """
    from noisescope.api import guarding
    from noisescope.cli.progress import Shown
    from noisescope.plans.gate import FAIL
    from noisescope.preparation import Options
    from noisescope.reports.junit import write_junit

    with common.plain_warnings():
        subject = common.load_subject(
            model, device=device, dtype=dtype, device_map=device_map, revision=revision, trust=trust_remote_code
        )
        with Shown() as progress:
            result = guarding.gate(
                subject,
                baseline,
                data,
                samples=samples,
                effort=effort,
                worse_than=1 + max_worse,
                max_degradation=max_degradation,
                other_samples=other_samples,
                max_tokens=max_tokens,
                slice_samples=slice_samples,
                step=step,
                options=Options(progress=progress),
            )
    paths = [] if junit is None else [write_junit(junit, "noisescope gate", _timed(result))]
    paths += [] if history is None else guarding.keep(result, history)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        say_verdict(result)
        for path in paths:
            typer.echo(f"  {path}")
    raise typer.Exit(1 if result["verdict"] == FAIL else 0)


def _timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks for JUnit: one measurement serves all of them, so each has its share of the time."""
    from noisescope.plans.gate import checks

    rows = checks(result)
    return [{**row, "seconds": result["seconds"] / len(rows)} for row in rows]


def say_verdict(result: dict[str, Any]) -> None:
    """The verdict, every check with its numbers, and the accuracy with its power."""
    from noisescope.plans.comparable import samples_told
    from noisescope.plans.gate import checks

    before = f"{result['baseline']['model']} ({result['baseline']['finished']})"
    typer.echo(f"{result['verdict']}: {result['model']} against {before}: {samples_told(result['n'])}\n")
    for row in checks(result):
        typer.echo(f"  {row['verdict']:<9}  {row['name']}: {row['message']}")
    typer.echo("\naccuracy, which does not decide:")
    for row in result["accuracy"]:
        where = "clean" if row["under_noise_in"] == "clean" else f"noise in {row['under_noise_in']}"
        sides = " -> ".join(f"{100 * row[side]['value']:.1f} %" for side in ("baseline", "candidate"))
        change, least = row["difference"], row["smallest_detectable"]
        ends = ", ".join("..." if change[end] is None else f"{100 * change[end]:+.1f}" for end in ("low", "high"))
        power = "no drop" if least is None else f"a drop of {100 * least:.1f} points"
        typer.echo(f"  {where}: {sides} ({100 * change['value']:+.1f} points [{ends}]); {power} would have shown")
