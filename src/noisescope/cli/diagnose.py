"""`noisescope diagnose MODEL`: the three levels, the metrics, the report."""

from __future__ import annotations

import typer

from noisescope.cli import common, outcome
from noisescope.options.diagnosing import DiagnoseOptions


def diagnose_model(asked: DiagnoseOptions) -> None:
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
    from noisescope.api.activations import save_activations
    from noisescope.api.diagnosing import cost_of_diagnosis, diagnose
    from noisescope.api.loading import load_subject
    from noisescope.cli.progress import Shown

    with common.plain_warnings():
        subject = load_subject(asked)
        if asked.dry_run:
            typer.echo(str(cost_of_diagnosis(subject, asked)))
            return
        with common.resumable(asked.output), Shown() as progress:
            report = diagnose(subject, options=common.running(asked, progress))
        if asked.save_activations and asked.output is not None:
            source = asked.data if asked.calibration is None else asked.calibration
            folder = asked.output / "activations"
            count = asked.calibration_samples
            save_activations(subject, source, folder, samples=count, max_tokens=asked.max_tokens)
    outcome.finish(report, asked.output, outcome.say_summary, as_json=asked.json)
