"""What several commands share: options by name, loading, reading of values."""

from __future__ import annotations

import logging
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


def subject_asked_for(asked: dict[str, Any]) -> Any:
    """The model that a command's options name."""
    return load_subject(
        asked["model"],
        device=asked["device"],
        dtype=asked["dtype"],
        device_map=asked["device_map"],
        revision=asked["revision"],
        trust=asked["trust_remote_code"],
    )


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


def hush_torchao() -> None:
    """Leave out what is logged when transformers imports torchao, if that is installed: nobody here can act on it.

    It says which of its kernels are not for this machine, and torch that it registers enums in an old way.
    """
    for logger in ("torchao", "torch.utils._pytree"):
        logging.getLogger(logger).addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Failed to load " not in text and " is an Enum subclass " not in text


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


def run_options(name: str, asked: dict[str, Any], progress: Any) -> Any:
    """Where and how a command's trials run, by its options."""
    from noisescope.preparation import Options

    return Options(
        output=None if asked["output"] is None else Path(asked["output"]),
        executor=asked["executor"],
        workers=asked["workers"],
        address=asked["address"],
        progress=progress,
        retry_failed=asked["retry_failed"],
        command=repeatable(name, asked),
    )


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
