"""`noisescope plan fault-tests REPORT`: tests for a hardware team, and what the model stands of them."""

from __future__ import annotations

import json
from typing import Any

import typer

from noisescope.cli import common
from noisescope.options.planning import FaultTestOptions


def plan_fault_tests(asked: FaultTestOptions) -> None:
    """Fault tests from a report, and their results.

    The operators, layers and channels that a report warns of, broken on purpose: what must hold then, and does it?

    \b
    noisescope plan fault-tests noisescope-demo --csv tests.csv
    noisescope plan fault-tests out/report.json --run --junit faults.xml -o tests
    noisescope plan fault-tests out/report.json --run --limit 2 --samples 16 --device cuda

    Exit code 1 where a test fails: too much accuracy lost, too many NaN, no recovery, a fault that locate can't find;
    3 where no test could be decided.
    """
    from noisescope.api.fault_plans import generate, to_csv
    from noisescope.api.stored import load_report
    from noisescope.api.words import headline, overall

    report = load_report(asked.report)
    tests = generate(report)[: asked.limit]
    results: list[dict[str, Any]] = []
    if asked.run:
        results = _results(report, tests, asked)
    elif not asked.json:
        for test in tests:
            say_test(test)
    found = {"tests": [test.to_dict() for test in tests], "results": results}
    paths = [] if asked.csv is None else [common.written(asked.csv, to_csv(tests))]
    if asked.output is not None:
        paths.append(common.written(asked.output / "fault_tests.csv", to_csv(tests)))
        paths.append(common.written(asked.output / "fault_tests.json", json.dumps(found, indent=1) + "\n"))
    if asked.junit is not None:
        from noisescope.api.drawing import write_junit

        paths.append(write_junit(asked.junit, "noisescope fault tests", results))
    rows = [row["verdict"] for row in results]
    verdict = overall(rows)
    if asked.json:
        typer.echo(json.dumps(found, indent=1))
    else:
        if rows:
            typer.echo(headline(verdict, rows))
        for path in paths:
            typer.echo(f"  {path}")
    common.leave(verdict, asked)


def _results(report: Any, tests: Any, asked: FaultTestOptions) -> list[dict[str, Any]]:
    """The tests carried out, each shown as soon as it ends."""
    with common.plain_warnings():
        from noisescope.api.fault_testing import run_reported
        from noisescope.api.loading import subject_of_report

        return run_reported(
            subject_of_report(report, asked), report, tests, asked, say_nothing if asked.json else say_result
        )


def say_test(test: Any) -> None:
    typer.echo(f"{test.test_id}: {test.component} ({test.parameters['reason']})")
    typer.echo(f"  {test.test_type}: {', '.join(test.parameters['faults'])}")
    typer.echo("  accepted: " + ", ".join(f"{name} {limit}" for name, limit in test.acceptance_criteria.items()))


def say_result(row: dict[str, Any]) -> None:
    typer.echo(f"{row['verdict']:<9}  {row['name']}")
    for criterion in row["criteria"]:
        typer.echo(f"  {criterion['verdict']:<9}  {criterion['criterion']}: {criterion['message']}")
    if not row["criteria"]:
        typer.echo(f"  {row['message']}")


def say_nothing(row: dict[str, Any]) -> None:
    return
