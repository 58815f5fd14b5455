"""`noisescope locate MODEL`: where it computes wrongly."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common

MOST_SUSPECTS = 5


def locate_fault(
    model: common.Model,
    method: Annotated[
        str, typer.Option("--method", help="auto, audit, relations, replay, srdd, fingerprint.")
    ] = "auto",
    simulate: Annotated[
        str | None,
        typer.Option("--simulate", help="A fault to look for, such as dead_zone:0.3@10 or gain:0.01@3/linear."),
    ] = None,
    failure: Annotated[
        Path | None, typer.Option("--failure", help="With fingerprint: the suspect system's record.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="A good device's record: whole tensors are replayed here.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts and checks.")] = 0,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the verdict there as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Find what computes wrongly.

    The layer, the operator, the channels, and the kind of fault.

    \b
    noisescope locate path/to/model --device cuda
    noisescope locate demo --simulate gain:0.01@7/linear        a fault put in, and looked for
    noisescope locate demo --simulate stuck_bit:bit=12@3/softmax --dtype bfloat16
    noisescope locate demo --method relations                   by laws of arithmetic: no weights, no host
    noisescope locate demo --method srdd
    noisescope locate path/to/model --device npu --reference gpu.record      modules on a good device's inputs
    noisescope locate path/to/model --method fingerprint --failure npu.record     a suspect's record, on a good device

    Records are written by `noisescope record`.

    No data and no second device is needed: the audit recomputes every operator on the host, in float64, from the
    inputs it really had; auto also tries relations where the audit could not look. Exit code 1 where something
    computes wrongly (with --simulate: where the fault was not found).
    """
    from noisescope.faults import faulty, parse_fault
    from noisescope.locators.locate import locate

    fault = None if simulate is None else parse_fault(simulate)
    with common.plain_warnings():
        subject = common.load_subject(
            model, device=device, dtype=dtype, device_map=device_map, revision=revision, trust=trust_remote_code
        )
        scope: Any = contextlib.nullcontext()
        if fault is not None:
            scope = faulty(subject.model, fault[0], fault[1], anatomy=subject.anatomy)
        with scope:
            verdict = locate(subject, method=method, failure=failure, reference=reference, seed=seed)
    changed = None if fault is None else scope.changed
    found = {**verdict.to_dict(), **({} if changed is None else {"simulated": simulate, "elements_changed": changed})}
    if output is not None:
        common.written(output, json.dumps(found, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        say_verdict(verdict)
    if fault is None:
        raise typer.Exit(1 if verdict.verdict == "faulty" else 0)
    right = say_whether_found(verdict, fault[1].place, changed or 0, quiet=as_json)
    raise typer.Exit(0 if right else 1)


def say_verdict(verdict: Any) -> None:
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
    for note in verdict.notes:
        typer.echo(f"note: {note}")


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


def say_whether_found(verdict: Any, place: Any, changed: int, *, quiet: bool) -> bool:
    """With a simulated fault: a fault that changed nothing has to come out healthy."""
    if changed == 0:
        right = bool(verdict.verdict == "healthy")
        words = "the simulated fault changed no element"
    else:
        first = verdict.suspects[0].site.place if verdict.suspects else None
        right = bool(verdict.verdict == "faulty" and (first == place or place == "*"))
        words = f"simulated at {place} ({changed} elements changed); " + ("found" if right else f"not found: {first}")
    if not quiet:
        typer.echo(words)
    return right
