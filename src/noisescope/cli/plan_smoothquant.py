"""`noisescope plan smoothquant REPORT`: outlier channels folded away, and what that gains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from noisescope.cli import common
from noisescope.options.planning import SmoothquantOptions

if TYPE_CHECKING:
    from noisescope.api.smoothing import SmoothingPlan

SHOWN = 10


def plan_smoothquant(asked: SmoothquantOptions) -> None:
    """Fold outlier channels away, and measure what it gains.

    SmoothQuant on a copy of the model: 8-bit weights and activations before and after, and for each module with
    outliers the method that the original method notes advise, with what it gains here.

    \b
    noisescope plan smoothquant out
    noisescope plan smoothquant out --alpha 0.5 --samples 64 --json
    noisescope plan smoothquant out --target W4A16
    """
    from noisescope.api.drawing import as_json
    from noisescope.api.stored import load_report

    found = load_report(asked.report)
    with common.plain_warnings():
        from noisescope.api.loading import subject_of_report
        from noisescope.api.smoothing import plan_smoothquant as carry_out

        result = carry_out(subject_of_report(found, asked), found, options=asked)
    if asked.output is not None:
        common.written(asked.output, as_json(result))
    if asked.json:
        typer.echo(as_json(result), nl=False)
    else:
        say_result(result)


def say_result(result: SmoothingPlan) -> None:
    from noisescope.api.words import estimate, gain_sentence, times_better

    typer.echo(result.scheme)
    before, after = (estimate(kl.typical).text for kl in (result.kl.before, result.kl.after))
    typer.echo(f"typical KL {before} before, {after} after (n = {result.gain.n})")
    typer.echo(gain_sentence(result.gain))
    typer.echo(f"the float output moved by {result.float_error:.2g} (relative L2)")
    folds = [fold for fold in result.folds if fold.alpha is not None]
    typer.echo(f"{len(folds)} of {len(result.folds)} folds smoothed; the others are better left alone")
    for row in result.recommendations[:SHOWN]:
        gains = ", ".join(f"{name} {times_better(gain)}" for name, gain in row.gains.items())
        strength = "" if row.alpha is None else f", alpha {row.alpha:g}"
        measured = f"; error of the linears there: {gains}" if gains else ""
        typer.echo(f"  {row.component}: {row.max_ratio:.1f} x the median: {row.method}{strength}{measured}")
    for note in result.notes:
        typer.echo(f"note: {note}")
