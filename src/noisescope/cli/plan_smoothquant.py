"""`noisescope plan smoothquant REPORT`: outlier channels folded away, and what that gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common
from noisescope.cli.report import load_report
from noisescope.errors import InvalidInput

SHOWN = 10


def plan_smoothquant(
    report: common.ReportPath,
    alpha: Annotated[
        str, typer.Option("--alpha", help="Migration strength from 0 to 1, or search: the best for each layer.")
    ] = "search",
    target: Annotated[str, typer.Option("--target", help="What advice is for: W8A8, W4A16 or W4A4.")] = "W8A8",
    samples: Annotated[int, typer.Option("--samples", help="Half calibrate, half measure.")] = 32,
    max_tokens: common.MaxTokens = 256,
    model: common.OtherModel = None,
    data: common.OtherData = None,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the result there as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fold outlier channels away, and measure what it gains.

    SmoothQuant on a copy of the model: 8-bit weights and activations before and after, and for each module with
    outliers the method that the original method notes advise, with what it gains here.

    \b
    noisescope plan smoothquant out
    noisescope plan smoothquant out --alpha 0.5 --samples 64 --json
    noisescope plan smoothquant out --target W4A16
    """
    from noisescope.api.smoothing import plan_smoothquant as carry_out

    found = load_report(report)
    with common.plain_warnings():
        subject = common.subject_of_report(
            found,
            model,
            device=device,
            dtype=dtype,
            device_map=device_map,
            revision=revision,
            trust=trust_remote_code,
        )
        result = carry_out(
            subject,
            found,
            data,
            alpha=_alpha(alpha),
            target=target,
            samples=samples,
            max_tokens=max_tokens,
        )
    if output is not None:
        common.written(output, json.dumps(result, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        say_result(result)


def _alpha(text: str) -> float | None:
    if text == "search":
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--alpha is a number from 0 to 1, or search; got {text!r}") from None


def say_result(result: dict[str, Any]) -> None:
    from noisescope.plans.smoothing import gain_told
    from noisescope.plans.words import span, times_better

    typer.echo(result["scheme"])
    before, after = (f"{kl['value']:.4g} {span(kl, '.3g')}" for kl in result["kl"].values())
    typer.echo(f"KL {before} before, {after} after (n = {result['gain']['n']})")
    typer.echo(gain_told(result["gain"]))
    typer.echo(f"the float output moved by {result['float_error']:.2g} (relative L2)")
    folds = [fold for fold in result["folds"] if fold["alpha"] is not None]
    typer.echo(f"{len(folds)} of {len(result['folds'])} folds smoothed; the others are better left alone")
    for row in result["recommendations"][:SHOWN]:
        gains = ", ".join(f"{name} {times_better(gain)}" for name, gain in row["gains"].items())
        strength = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
        measured = f"; error of the linears there: {gains}" if gains else ""
        typer.echo(f"  {row['component']}: {row['max_ratio']:.1f} x the median: {row['method']}{strength}{measured}")
    for note in result["notes"]:
        typer.echo(f"note: {note}")
