"""`noisescope record MODEL`: what this device computes, for a comparison with another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from noisescope.cli import common
from noisescope.record_format import is_unfinished


def record_device(
    model: common.Model,
    data: common.Data = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder.")] = Path("noisescope.record"),
    detail: Annotated[str, typer.Option("--detail", help="sketch, or full: whole tensors of everything.")] = "sketch",
    full_layers: Annotated[
        str | None, typer.Option("--full-layers", help="Whole tensors of these blocks, such as 9,10.")
    ] = None,
    inputs: Annotated[
        bool, typer.Option("--inputs/--no-inputs", help="With whole tensors: what modules were given, for a replay.")
    ] = True,
    samples: common.Samples = 32,
    max_tokens: common.MaxTokens = 128,
    batch: Annotated[int, typer.Option("--batch", help="Prompts of one length in one forward.")] = 16,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Record what this device computes, operator by operator.

    \b
    noisescope record path/to/model --data gsm8k.jsonl --device cuda -o gpu.record
    noisescope record path/to/model --data gsm8k.jsonl --device npu -o npu.record --full-layers 9,10
    noisescope compare gpu.record npu.record

    Sketches of every operator's output take about 1 % of the tensors' size. Use the same data, --samples and
    --max-tokens on both machines. Whole tensors (--detail full) let `noisescope locate --reference` replay each module
    on the other device's inputs.
    """
    from noisescope.api import record

    with common.plain_warnings(), _interruptible(output):
        subject = common.load_subject(
            model, device=device, dtype=dtype, device_map=device_map, revision=revision, trust=trust_remote_code
        )
        found = record(
            subject,
            data,
            output,
            detail=detail,
            full_layers=common.layers(full_layers) or (),
            inputs=inputs,
            samples=samples,
            max_tokens=max_tokens,
            batch=batch,
        )
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
    if as_json:
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
    try:
        yield
    except KeyboardInterrupt:
        left = f" {output} holds an unfinished record: remove it, and record again" if is_unfinished(output) else ""
        typer.echo(f"\ninterrupted.{left}", err=True)
        raise typer.Exit(130) from None
