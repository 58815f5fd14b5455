"""`noisescope diagnose MODEL`: sensitivity at three levels; `noisescope robustness MODEL`: accuracy by noise level."""

from __future__ import annotations

import typer

from noisescope import api
from noisescope.cli import commands, output
from noisescope.cli.output import ProgressBar
from noisescope.options.sensitivity import DiagnoseOptions, RobustnessOptions


def diagnose_model(options: DiagnoseOptions) -> None:
    """Find what is sensitive to numerical error.

    Which operators, layers and channels lose most when their arithmetic gets a little wrong.

    \b
    noisescope diagnose demo
    noisescope diagnose path/to/model --data gsm8k.jsonl --device cuda -o out
    noisescope diagnose path/to/model --effort screen          two backward passes, seconds
    noisescope diagnose path/to/model --level operator --operators softmax,norm
    noisescope diagnose path/to/model --dry-run                what it would cost
    noisescope diagnose --config run.yaml --seeds 5            the file's options, and another number of seeds

    The same command into the same folder resumes. Levels: operator (which kind of operation), layer (sliding windows,
    avalanche points, layer x operator map), channel (outliers).
    """
    with commands.plain_warnings():
        subject = api.preparation.load_subject(options)
        if options.dry_run:
            typer.echo(str(api.diagnosis.cost_of_diagnosis(subject, options)))
            return
        with commands.explain_resuming(options.output), ProgressBar() as progress:
            report = api.diagnosis.diagnose(subject, options=commands.resumable_options(options, progress))
        if options.save_activations and options.output is not None:
            source = options.data if options.calibration is None else options.calibration
            folder, count = options.output / "activations", options.calibration_samples
            api.records.save_activations(subject, source, folder, samples=count, max_tokens=options.max_tokens)
    output.finish(report, options.output, output.print_summary, as_json=options.json)


def robustness_of_model(options: RobustnessOptions) -> None:
    """Accuracy at several noise levels.

    With the share of the clean accuracy that is retained, and intervals.

    \b
    noisescope robustness demo
    noisescope robustness path/to/model --data gsm8k.jsonl --noise-levels 0,0.02,0.05 --samples 200 --device cuda
    """
    with commands.plain_warnings():
        subject = api.preparation.load_subject(options)
        with commands.explain_resuming(options.output), ProgressBar() as progress:
            report = api.diagnosis.robustness(subject, options=commands.resumable_options(options, progress))
    output.finish(report, options.output, print_levels, as_json=options.json)


def print_levels(report: api.reports.Report) -> None:
    found, words = report.robustness, api.reports.words
    data = found.run.data
    how = {"generate": "by generation", "score": "teacher-forced"}.get(data.measure, "by your metric")
    typer.echo(f"{found.run.model.source}: {data.source}, {data.samples} samples, {how}\n")
    typer.echo(f"{'noise':>8}  {'accuracy':>26}  {'retention':>26}  band of the loss")
    for row in found.robustness.levels:
        if row.error:
            typer.echo(f"{row.noise_level:>8g}  failed: {row.error}")
            continue
        accuracy, retention = (words.estimate(one, share=True).text for one in (row.accuracy, row.retention))
        band = words.band_of(row).text if row.injected else ""
        typer.echo(f"{row.noise_level:>8g}  {accuracy:>26}  {retention:>26}  {band}")
