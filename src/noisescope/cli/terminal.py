"""Printing: every text that a command shows goes through `say`."""

from __future__ import annotations

import typer

from noisescope.plain_text import visible


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines of text. What a terminal would obey (colours, cursor, direction of writing) is shown instead."""
    typer.echo(visible(str(text), keep="\n\t"), err=err, nl=nl)
