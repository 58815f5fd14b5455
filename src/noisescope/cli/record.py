"""`noisescope record MODEL`: what this device computes, for a comparison with another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from noisescope.cli import common
from noisescope.options.comparing import RecordOptions


def record_device(asked: RecordOptions) -> None:
    """Record what this device computes, operator by operator.

    \b
    noisescope record path/to/model --data gsm8k.jsonl --device cuda -o gpu.record
    noisescope record path/to/model --data gsm8k.jsonl --device npu -o npu.record --full-layers 9,10
    noisescope compare gpu.record npu.record
    noisescope record demo --simulate dead_zone:0.3@10 -o broken.record     as a faulty device would record

    Sketches of every operator's output take about 1 % of the tensors' size. Use the same data, --samples and
    --max-tokens on both machines. Whole tensors (--detail full) let `noisescope locate --reference` replay each module
    on the other device's inputs.
    """
    from noisescope.api.locating import checked_fault

    output = asked.output
    checked_fault(asked.simulate)  # before torch is imported
    with common.plain_warnings(), _interruptible(output):
        from noisescope.api.loading import load_subject
        from noisescope.api.recording import record

        found = record(load_subject(asked), options=asked)
    size = sum(file.stat().st_size for file in output.iterdir())
    facts = {
        "record": str(output),
        "bytes": size,
        "sites": len(found.sites),
        "prompts": found.count,
        "tokens": sum(map(len, found.prompts)),
        "device": found.device,
        "dtype": found.dtype,
        "notes": list(found.notes),
    }
    if asked.json:
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(
        f"{output}: {facts['sites']} sites, {facts['prompts']} prompts, {facts['tokens']} tokens, {found.dtype} on "
        f"{found.device}, {size / 1e6:.1f} MB"
    )
    for note in found.notes:
        typer.echo(f"note: {note}")


@contextmanager
def _interruptible(output: Path) -> Iterator[None]:
    """Ctrl-C says what is left behind."""
    from noisescope.api.recording import is_unfinished

    try:
        yield
    except KeyboardInterrupt:
        left = f" {output} holds an unfinished record: remove it, and record again" if is_unfinished(output) else ""
        typer.echo(f"\ninterrupted.{left}", err=True)
        raise typer.Exit(130) from None
