"""`noisescope locate MODEL`: where it computes wrongly."""

from __future__ import annotations

import json
from typing import Any

import typer

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.options.device_commands import LocateOptions

MOST_SUSPECTS = 5
CHECKS: dict[str, api.reports.pass_fail.Verdict] = {
    "healthy": "pass",
    "faulty": "fail",
    "undecided": "undecided",
}  # of a real device


def locate_fault(options: LocateOptions) -> None:
    """Find what computes wrongly.

    The layer, the operator, the channels, and the kind of fault.

    \b
    noisescope locate path/to/model --device cuda
    noisescope locate demo --simulate gain:0.01@7/linear        a fault put in, and looked for
    noisescope locate demo --simulate stuck_bit:bit=12@3/softmax --dtype bfloat16
    noisescope locate demo --method relations                   by laws of arithmetic: no weights, no host
    noisescope locate demo --method scans
    noisescope locate demo --method fingerprint --simulate dead_zone:0.3@10
    noisescope locate path/to/model --device npu --reference gpu.record      modules on a good device's inputs
    noisescope locate path/to/model --method fingerprint --failure npu.record     a suspect's record, on a good device

    Records are written by `noisescope record`.

    No data and no second device is needed: the audit recomputes every operator on the host, in float64, from the
    inputs it really had; auto also tries relations where the audit could not look. Exit code 1 where something
    computes wrongly (with --simulate: where the fault was not found), 3 where that could not be decided. --simulate
    works with every method: a record that the method needs is made of this model.
    """
    api.locate_simulated.check_fault(options.simulated)  # before torch is imported

    place, changed = None, None
    with command_builder.plain_warnings():
        subject = api.preparation.load_subject(options)
        if options.simulated is None:
            verdict = api.locate(subject, options=options)
        else:
            verdict, place, changed = api.locate_simulated.locate_simulated(subject, options)
    simulated = {} if changed is None else {"simulated": options.simulated, "elements_changed": changed}
    text = json.dumps({**verdict.to_dict(), **simulated}, indent=1) + "\n"
    output.emit(text, options, lambda: print_verdict(verdict))
    if changed is None:
        command_builder.exit_by(CHECKS[verdict.verdict], options)
    right, words = was_found(verdict, place, changed)
    if not options.json:
        typer.echo(words)
    command_builder.exit_by("pass" if right else "undecided" if verdict.verdict == "undecided" else "fail", options)


def print_verdict(verdict: Any) -> None:
    """The verdict, the likeliest suspects, what could have been seen, what it cost."""
    typer.echo(f"{verdict.verdict} ({verdict.method}: {verdict.checked} checks, {verdict.forwards:g} forwards)")
    for i, suspect in enumerate(verdict.suspects[:MOST_SUSPECTS], 1):
        typer.echo(f"{i}. {suspect.site}: {suspect.fault_class}, confidence {suspect.confidence:.2f}")
        typer.echo(f"   {suspect.evidence}{_channels(suspect)}")
    if len(verdict.suspects) > MOST_SUSPECTS:
        typer.echo(f"   and {len(verdict.suspects) - MOST_SUSPECTS} more (--json lists all)")
    if verdict.verdict == "healthy" and verdict.smallest_visible:
        typer.echo("the smallest fault that would have shown:")
        for name, seen in verdict.smallest_visible.items():
            typer.echo(f"  {name}: {_seen(seen)}")
    output.print_each(verdict.notes, "note: ")


def _seen(seen: Any) -> str:
    if not isinstance(seen, dict):
        return str(seen)
    return ", ".join(f"{key.replace('_', ' ')} {_size(value)}" for key, value in seen.items())


def _size(value: Any) -> str:
    """A number; of relations the size of a class of faults, relative to the rms, where 0 is a single bit."""
    if isinstance(value, dict):
        value = value["size"]
        return "not visible" if value is None else "any" if value == 0 else f"{value:.2g}"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _channels(suspect: Any) -> str:
    if suspect.period:
        return f"; every {suspect.period} channels"
    if not suspect.channels:
        return ""
    named = ", ".join(map(str, suspect.channels[:8])) + (", ..." if len(suspect.channels) > 8 else "")
    return f"; channels {named}"


def was_found(verdict: Any, place: Any, changed: int) -> tuple[bool, str]:
    """Whether the verdict on a simulated fault is right, and in words; a fault that changed nothing is healthy."""
    if changed == 0:
        return verdict.verdict == "healthy", "the simulated fault changed no element"
    first = verdict.suspects[0].site.place if verdict.suspects else None
    right = verdict.verdict == "faulty" and (first == place or place == "*")
    return right, f"simulated at {place} ({changed} elements changed); {'found' if right else f'not found: {first}'}"
