"""`noisescope robustness MODEL`: accuracy at several noise levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from noisescope.cli import common, outcome
from noisescope.options.diagnosing import RobustnessOptions

if TYPE_CHECKING:
    from noisescope.api.stored import Report


def robustness_of_model(asked: RobustnessOptions) -> None:
    """Accuracy at several noise levels.

    With the share of the clean accuracy that is retained, and intervals.

    \b
    noisescope robustness demo
    noisescope robustness path/to/model --data gsm8k.jsonl --noise-levels 0,0.02,0.05 --samples 200 --device cuda
    """
    from noisescope.api.diagnosing import robustness
    from noisescope.api.loading import load_subject
    from noisescope.cli.progress import Shown

    with common.plain_warnings():
        subject = load_subject(asked)
        with common.resumable(asked.output), Shown() as progress:
            report = robustness(subject, options=common.running(asked, progress))
    outcome.finish(report, asked.output, say_levels, as_json=asked.json)


def say_levels(report: Report) -> None:
    from noisescope.api.words import band_of, estimate

    found = report.robustness
    data = found.run.data
    how = {"generate": "by generation", "score": "teacher-forced"}.get(data.measure, "by your metric")
    typer.echo(f"{found.run.model.source}: {data.source}, {data.samples} samples, {how}\n")
    typer.echo(f"{'noise':>8}  {'accuracy':>26}  {'retention':>26}  band of the loss")
    for row in found.robustness.levels:
        if row.error:
            typer.echo(f"{row.noise_level:>8g}  failed: {row.error}")
            continue
        accuracy, retention = (estimate(one, share=True).text for one in (row.accuracy, row.retention))
        band = band_of(row).text if row.injected else ""
        typer.echo(f"{row.noise_level:>8g}  {accuracy:>26}  {retention:>26}  {band}")
