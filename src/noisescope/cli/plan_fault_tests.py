"""`noisescope plan fault-tests REPORT`: tests for a hardware team, and what the model stands of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from noisescope.cli import common
from noisescope.options.planning import FaultTestOptions

if TYPE_CHECKING:
    from noisescope.api.fault_plans import FaultTest, FaultTestResult
    from noisescope.api.stored import Report


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
    from noisescope.api.drawing import as_json, write_junit
    from noisescope.api.fault_plans import generate, to_csv
    from noisescope.api.stored import load_report
    from noisescope.api.words import headline, overall

    report = load_report(asked.report)
    tests = generate(report.diagnosis)[: asked.limit]
    results: list[FaultTestResult] = []
    if asked.run:
        results = _results(report, tests, asked)
    elif not asked.json:
        for test in tests:
            say_test(test)
    found = as_json({"tests": [test.to_dict() for test in tests], "results": results})
    paths = [] if asked.csv is None else [common.written(asked.csv, to_csv(tests))]
    if asked.output is not None:
        paths.append(common.written(asked.output / "fault_tests.csv", to_csv(tests)))
        paths.append(common.written(asked.output / "fault_tests.json", found))
    if asked.junit is not None:
        spent = [result.seconds for result in results]
        paths.append(write_junit(asked.junit, "noisescope fault tests", results, seconds=spent))
    rows = [result.verdict for result in results]
    verdict = overall(rows)
    if asked.json:
        typer.echo(found, nl=False)
    else:
        if rows:
            typer.echo(headline(verdict, [one.verdict for result in results for one in result.criteria] or rows))
        for path in paths:
            typer.echo(f"  {path}")
    if rows:
        common.leave(verdict, asked)


def _results(report: Report, tests: list[FaultTest], asked: FaultTestOptions) -> list[FaultTestResult]:
    """The tests carried out, each shown as soon as it ends."""
    with common.plain_warnings():
        from noisescope.api.fault_testing import run_reported
        from noisescope.api.loading import subject_of_report

        return run_reported(
            subject_of_report(report, asked), report, tests, asked, on_result=say_nothing if asked.json else say_result
        )


def say_test(test: FaultTest) -> None:
    typer.echo(f"{test.test_id}: {test.component} ({test.parameters.reason})")
    typer.echo(f"  {test.test_type}: {', '.join(test.parameters.faults)}")
    criteria = test.acceptance_criteria.columns()
    typer.echo("  accepted: " + ", ".join(f"{name} {limit}" for name, limit in criteria.items()))


def say_result(result: FaultTestResult) -> None:
    typer.echo(f"{result.verdict:<9}  {result.name}")
    if result.measured is not None:
        typer.echo(f"  {result.measured.hits}")
    for criterion in result.criteria:
        typer.echo(f"  {criterion.verdict:<9}  {criterion.criterion}: {criterion.message}")
    if not result.criteria:
        typer.echo(f"  {result.message}")


def say_nothing(result: FaultTestResult) -> None:
    return
