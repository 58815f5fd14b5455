"""What several commands share: options by name, loading, and the words at the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.errors import InvalidInput

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or id, a .gguf or .pt file, or demo.")
]
ReportPath = Annotated[Path, typer.Argument(metavar="REPORT", help="A run's folder, or a report.json.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="JSONL, JSON, CSV or Parquet. Default: the demo's own, else built-in text."),
]
Samples = Annotated[int, typer.Option("--samples", help="Samples to measure on.")]
Seeds = Annotated[int, typer.Option("--seeds", help="How many noise seeds.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longer samples are cut.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="With --generate: the longest answer.")]
Metric = Annotated[
    str, typer.Option("--metric", help="What bands are taken of: accuracy, next_token_accuracy, agreement.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...")]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="accelerate's, such as auto: a model larger than a device.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16. Default: as stored.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Of a hub id.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Off by default.")]
Executor = Annotated[str, typer.Option("--executor", help="local or ray.")]
Workers = Annotated[int, typer.Option("--workers", help="With --executor ray.")]
Address = Annotated[str | None, typer.Option("--address", help="Of a Ray cluster.")]
SliceSamples = Annotated[int, typer.Option("--slice", help="Samples in one forward; fewer need less memory.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Run trials again that failed before.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
OtherModel = Annotated[str | None, typer.Option("--model", help="Default: the report's.")]
OtherData = Annotated[Path | None, typer.Option("--data", help="Default: the report's.")]


def load_subject(
    model: str, *, device: str, dtype: str | None, device_map: str | None, revision: str | None, trust: bool
) -> Any:
    """The model, without the loader's own progress bars."""
    from transformers.utils import logging

    from noisescope.model import load

    logging.disable_progress_bar()
    return load(model, device=device, dtype=dtype, device_map=device_map, revision=revision, trust_remote_code=trust)


def subject_of_report(report: Any, model: str | None, *, dtype: str | None, **loading: Any) -> Any:
    """The model that a report is of, in the dtype it was measured in; or another one."""
    source, measured_in = report["run"]["model"]["source"], report["run"]["conditions"]["dtype"]
    return load_subject(model or source, dtype=dtype or measured_in, **loading)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings as one line without source code."""

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        typer.echo(f"warning: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def resumable(output: Path | None) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "" if output is None else f" What was measured is kept: noisescope runs resume {output}"
        typer.echo(f"\ninterrupted.{kept}", err=True)
        raise typer.Exit(130) from None


def repeatable(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """A command for `runs resume`: its paths mean the same from any folder. A hub id or a name stays what it is."""
    options = dict(asked)
    for key in ("model", "data", "calibration"):
        path = options.get(key)
        if isinstance(path, str) and path != "demo" and Path(path).exists():
            options[key] = str(Path(path).absolute())
    return {"name": name, "options": options}


def numbers(text: str, what: str) -> tuple[float, ...]:
    """ "0,0.05" as numbers."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidInput(f"{what} must be numbers with commas between, such as 0,0.05,0.10; got {text!r}") from None


def layers(text: str | None) -> tuple[int, ...] | None:
    """ "9,10" as layers; None where none were given."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidInput(f"layers must be whole numbers with commas between, such as 9,10; got {text!r}") from None


def names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def written(path: Path, text: str) -> Path:
    """The path of a text file that was written, its folder made where there was none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror or error}") from error
    return path


def say_summary(report: Any, paths: list[Path]) -> None:
    """The first screen: risk, top findings, next step, where the files are."""
    say_findings(report)
    say_files(report, paths)


def say_findings(report: Any) -> None:
    summary = report["executive_summary"]
    run = report["run"]
    typer.echo(
        f"{run['model']['source']}: {run['model']['architecture']}, {run['model']['blocks']} blocks, {run['device']}"
    )
    data = run["data"]
    note = f" ({data['note']})" if data["note"] else ""
    typer.echo(f"data: {data['source']}, {data['samples']} samples{note}")
    typer.echo(f"\nrisk: {summary['overall_risk_level']} (report score {summary['report_risk']['score']:g})")
    for i, finding in enumerate(summary["top_findings"], 1):
        typer.echo(f"{i}. [{finding['severity']}] {finding['component']}: {finding['statement']}{_span(finding)}")
    if not summary["top_findings"]:
        typer.echo("nothing stands out")
    typer.echo(f"\nnext: {summary['next_step']}")


def say_files(report: Any, paths: list[Path]) -> None:
    cost = report["run"]["cost"]
    typer.echo(
        f"\n{cost['trials_run_now']} trials run now ({cost['trials']} in the store), "
        f"{cost['forwards']:.1f} forwards of the test data, {cost['seconds']:.1f} s"
    )
    for path in paths:
        typer.echo(f"  {path}")


def percent_span(row: Any) -> str:
    """An estimate of a share: "91.4 % [89.5, 93.0]"."""
    if not row:
        return ""
    if row["value"] is None:
        return str(row.get("note", ""))
    if row["low"] is None or row["high"] is None:
        return f"{100 * row['value']:.1f} %"
    return f"{100 * row['value']:.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def _span(finding: Any) -> str:
    interval = finding["interval"]
    if interval is None:
        return f" (n = {finding['n']})"
    share = "of the accuracy" in finding["statement"]
    low, high = ("..." if end is None else f"{100 * end:.1f} %" if share else f"{end:.3g}" for end in interval)
    return f" [{low}, {high}], n = {finding['n']}"
