"""`noisescope demo`: everything on the bundled model, on a CPU, in under a minute."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common, outcome
from noisescope.findings import percent

SAMPLES = 64  # and two seeds: enough for the avalanche point to be sure, in the time that a first look may take
HELD_OUT = 100
BITS = 5
BROKEN = "stuck_bit:bit=16@6/linear/down_proj"  # what is put in, and has to be found
FAULT = "int4"  # 4-bit integers with one scale a tensor


def run_demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the store and the reports.")] = Path(
        "noisescope-demo"
    ),
    as_json: common.Json = False,
) -> None:
    """Everything on the bundled model, in a minute.

    Diagnoses it, puts the findings to the test with a simulated fault, plans its precision, finds a fault, and writes
    the reports.

    \b
    noisescope demo
    noisescope demo -o somewhere

    The bundled model answers arithmetic problems in words. No network, no GPU, no other model is needed.
    """
    demonstrate({"output": str(output)}, as_json=as_json)


def demonstrate(asked: dict[str, Any], *, as_json: bool = False) -> None:
    """The command from its options as plain values."""
    output = Path(asked["output"])
    started = time.perf_counter()
    if not as_json:
        typer.echo(
            "1. diagnosing the bundled model: 5 % noise in every operator, window of layers and channel", err=True
        )
    from noisescope import api, demo
    from noisescope.cli.progress import Shown
    from noisescope.data import read_data
    from noisescope.probe.formats import Format

    problems = read_data(demo.test_file(), limit=SAMPLES + HELD_OUT)
    unseen = dataclasses.replace(problems, items=problems.items[SAMPLES:])
    with common.plain_warnings(), common.resumable(output):
        subject = common.load_subject("demo", device="cpu", dtype=None, device_map=None, revision=None, trust=False)
        with Shown() as progress:
            options = api.Options(output=output, progress=progress, command={"name": "demo", "options": {}})
            report = api.diagnose(
                subject, samples=SAMPLES, seeds=2, slice_samples=SAMPLES, calibration_samples=128, options=options
            )
        if not as_json:
            typer.echo("2. simulating a fault where the report warns, and where it does not", err=True)
        report = api.put_to_the_test(
            subject,
            report,
            unseen,
            Format(FAULT),
            name="4-bit integers (one scale a tensor)",
            samples=HELD_OUT,
            output=output,
        )
        if not as_json:
            typer.echo(f"3. planning {BITS} bits a weight, and measuring what that costs", err=True)
        report = api.with_precision_planned(subject, report, BITS)
        if not as_json:
            typer.echo("4. breaking one operation on purpose, and looking for it without a reference", err=True)
        report = api.with_fault_located(subject, report, BROKEN, output=output)
    outcome.finish(report, output, say_demo, as_json=as_json)
    if not as_json:
        seconds = time.perf_counter() - started
        typer.echo(f"\n{seconds:.0f} s in all. Open {output / 'report.html'} in a browser.")


def say_demo(report: Any) -> None:
    """What was found, a few lines that make the point, what it cost."""
    outcome.say_findings(report)
    say_check(report)
    outcome.say_cost(report)


def say_check(report: Any) -> None:
    """Whether the findings held, what a plan gains, whether a fault is found."""
    section = report["check"]
    typer.echo(f"\nwas it right? Linears that give {section['fault']}, three layers at a time, on")
    typer.echo(f"{section['samples']} problems the diagnosis has not seen:")
    says = {"warned": "<- the report warns of these", "least": "<- diverge least in the report", "between": ""}
    for row in section["windows"]:
        where = f"layers {row['start_layer']} to {row['end_layer']}"
        right = f"{percent(row['baseline_acc'])} -> {percent(row['noisy_acc'])} right"
        typer.echo(f"  {where:<16} {right}  {says[row['role']]}".rstrip())
    plan, rivals = report["precision_plan"], []
    if plan["seeds_rule_kl"] is not None:
        rivals.append(f"{plan['seeds_rule_kl']:.3g} by the bit rule of the original method notes")
    rivals.append(f"{plan['random']['median_kl']:.3g} by the median of {plan['random']['n']} random plans")
    typer.echo(f"\nplanned at {plan['average_bits']:.2f} bits a weight: KL {plan['kl']:.3g} ({', '.join(rivals)})")
    found = report["locate"]
    typer.echo(f"\nbroken on purpose: {found['simulated']}; located in {found['forwards']:g} forwards:")
    for suspect in found["suspects"][:1]:
        where = f"layer {suspect['place']}, {suspect['operator']} ({suspect['module']})"
        typer.echo(f"  {where}: {suspect['fault_class']}, confidence {suspect['confidence']:.2f}")
