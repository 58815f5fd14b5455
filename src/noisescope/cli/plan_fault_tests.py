"""`noisescope plan fault-tests REPORT`: tests for a hardware team, and what the model stands of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common
from noisescope.cli.report import load_report
from noisescope.errors import InvalidInput


def plan_fault_tests(
    report: common.ReportPath,
    run: Annotated[bool, typer.Option("--run", help="Carry them out with the fault simulator.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="With --run. Default: the report's.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="With --run. Default: the report's.")] = None,
    samples: common.Samples = 32,
    limit: Annotated[int | None, typer.Option("--limit", help="The first so many tests.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the tests there.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="With --run: the results as JUnit XML.")] = None,
    max_tokens: common.MaxTokens = 256,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for fault_tests.csv, .json and the results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print tests and results as JSON.")] = False,
) -> None:
    """Fault tests from a report, and their results.

    The operators, layers and channels that a report warns of, broken on purpose: what must hold then, and does it?

    \b
    noisescope plan fault-tests noisescope-demo --csv tests.csv
    noisescope plan fault-tests out/report.json --run --junit faults.xml -o tests
    noisescope plan fault-tests out/report.json --run --limit 2 --samples 16 --device cuda

    Exit code 1 where a test fails: too much accuracy lost, too many NaN, no recovery, a fault that locate can't find.
    """
    from noisescope.plans.fault_tests import generate, to_csv

    if limit is not None and limit < 1:
        raise InvalidInput(f"--limit is how many tests, 1 or more; got {limit}")
    if junit is not None and not run:
        raise InvalidInput("--junit holds the results of tests, and none are carried out: give --run, too")
    loaded = load_report(report)
    tests = generate(loaded)[:limit]
    results: list[dict[str, Any]] = []
    if run:
        from noisescope.api.fault_testing import run_fault_tests
        from noisescope.api.reported import check_sizes, data_of

        with common.plain_warnings():
            subject = common.subject_of_report(
                loaded,
                model,
                dtype=dtype,
                device=device,
                device_map=device_map,
                revision=revision,
                trust=trust_remote_code,
            )
            check_sizes(loaded, subject)
            told = say_nothing if as_json else say_result
            asked = data_of(loaded) if data is None else data
            results = run_fault_tests(subject, tests, asked, samples=samples, max_tokens=max_tokens, told=told)
    elif not as_json:
        for test in tests:
            typer.echo(f"{test.test_id}: {test.component} ({test.parameters['reason']})")
            typer.echo(f"  {test.test_type}: {', '.join(test.parameters['faults'])}")
            typer.echo(
                "  accepted: " + ", ".join(f"{name} {limit}" for name, limit in test.acceptance_criteria.items())
            )
    found = {"tests": [test.to_dict() for test in tests], "results": results}
    paths = [] if csv is None else [common.written(csv, to_csv(tests))]
    if output is not None:
        paths.append(common.written(output / "fault_tests.csv", to_csv(tests)))
        paths.append(common.written(output / "fault_tests.json", json.dumps(found, indent=1) + "\n"))
    if junit is not None:
        from noisescope.reports.junit import write_junit

        paths.append(write_junit(junit, "noisescope fault tests", results))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for path in paths:
            typer.echo(f"  {path}")
    raise typer.Exit(1 if any(row["verdict"] == "fail" for row in results) else 0)


def say_result(row: dict[str, Any]) -> None:
    typer.echo(f"{row['verdict']:<9}  {row['name']}")
    for criterion in row["criteria"]:
        typer.echo(f"  {criterion['verdict']:<9}  {criterion['criterion']}: {criterion['message']}")
    if not row["criteria"]:
        typer.echo(f"  {row['message']}")


def say_nothing(row: dict[str, Any]) -> None:
    return
