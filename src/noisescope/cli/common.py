"""What several commands share: warnings and interrupts in one line, stored commands, files, exit codes."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from noisescope.errors import InvalidInput
from noisescope.options.groups import CheckingOptions, ExecutionOptions

if TYPE_CHECKING:
    from noisescope.api.words import Verdict

E = TypeVar("E", bound=ExecutionOptions)


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


def running(asked: E, progress: Any) -> E:
    """The options of a run that is shown as it goes, and that `runs resume` can repeat from any folder."""
    stored = {name: value for name, value in asked.plain().items() if name not in ("config", "json")}
    for key in ("model", "data", "calibration", "baseline"):
        path = stored.get(key)
        if isinstance(path, str) and path != "demo" and Path(path).exists():
            stored[key] = str(Path(path).absolute())  # a hub id or a name stays what it is
    return dataclasses.replace(asked, progress=progress, repeat={"name": asked.command, "options": stored})


def leave(verdict: Verdict, asked: CheckingOptions) -> NoReturn:
    """The exit code of a verdict: 0 pass, 1 fail, 3 undecided, which --allow-undecided makes 0."""
    from noisescope.api.words import exit_code

    raise typer.Exit(exit_code(verdict, allow_undecided=asked.allow_undecided))


def written(path: Path, text: str) -> Path:
    """The path of a text file that was written, its folder made where there was none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror or error}") from error
    return path
