"""`noisescope demo`: everything on the bundled model, on a CPU, in under a minute."""

from __future__ import annotations

import time

import typer

from noisescope import api
from noisescope.cli import commands, output
from noisescope.cli.output import ProgressBar
from noisescope.options.sensitivity import DemoOptions


def run_demo(options: DemoOptions) -> None:
    """Everything on the bundled model, in a minute.

    Diagnoses it, tests the findings with a simulated fault, plans its precision, finds a fault, and writes
    the reports.

    \b
    noisescope demo
    noisescope demo -o somewhere

    The bundled model answers arithmetic problems in words. No network, no GPU, no other model is needed.
    """
    started = time.perf_counter()

    def announce(line: str) -> None:
        if not options.json:
            typer.echo(line, err=True)

    announce("1. diagnosing the bundled model: 5 % noise in every operator, window of layers and channel")

    with commands.plain_warnings(), commands.explain_resuming(options.output), ProgressBar() as progress:
        report = api.diagnosis.run_demo(options.output, progress, announce)
    output.finish(report, options.output, print_demo, as_json=options.json)
    if not options.json:
        seconds = time.perf_counter() - started
        typer.echo(f"\n{seconds:.0f} s in all. Open {options.output / 'report.html'} in a browser.")


def print_demo(report: api.reports.Report) -> None:
    """The findings, whether they held, what it cost."""
    output.print_findings(report)
    print_check(report)
    output.print_cost(report)


def print_check(report: api.reports.Report) -> None:
    """Whether the findings held, what a plan gains, whether a fault is found."""
    found = report.diagnosis
    assert found.check is not None and found.precision_plan is not None and found.locate is not None
    typer.echo(f"\nwas it right? Linears that give {found.check.fault}, three layers at a time, on")
    typer.echo(f"{found.check.samples} problems the diagnosis has not seen:")
    roles = {"warned": "<- the report warns of these", "least": "<- diverge least in the report", "between": ""}
    for row in found.check.windows:
        where = f"layers {row.start_layer} to {row.end_layer}"
        clean, faulty = (api.reports.percent(share or 0.0) for share in (row.baseline_acc, row.noisy_acc))
        right = row.error or f"{clean} -> {faulty} right"
        typer.echo(f"  {where:<16} {right}  {roles[row.role]}".rstrip())
    _print_plan(found.precision_plan)
    located = found.locate
    typer.echo(f"\nbroken on purpose: {located.simulated}; located in {located.forwards:g} forwards:")
    for suspect in located.suspects[:1]:
        where = f"layer {suspect.place}, {suspect.operator} ({suspect.module})"
        typer.echo(f"  {where}: {suspect.fault_class}, confidence {suspect.confidence:.2f}")


def _print_plan(plan: api.plans.PrecisionPlan) -> None:
    """The plan beside what else the same bits could buy."""
    assert plan.typical_kl is not None
    rivals = []
    if plan.uniform_typical_kl is not None:
        rivals.append(f"{plan.uniform_typical_kl:.3g} by {plan.uniform_format} everywhere")
    if plan.bit_rule_typical_kl is not None:
        rivals.append(f"{plan.bit_rule_typical_kl:.3g} by the bit rule of the original method notes")
    beside = f" ({', '.join(rivals)})" if rivals else ""
    typer.echo(f"\nplanned at {plan.average_bits:.2f} bits per weight: typical KL {plan.typical_kl:.3g}{beside}")
