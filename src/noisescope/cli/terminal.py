"""Printing: every text that a command shows goes through `say`."""

from __future__ import annotations

from collections.abc import Callable

import typer

from noisescope.plain_text import one_line, visible

LONGEST_LINE = 1000  # characters
BEFORE_PRINTING: list[Callable[[], None]] = []  # called first: a progress bar makes room for text


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines of text. What a terminal would obey (colours, cursor, direction of writing) is shown instead."""
    for make_room in BEFORE_PRINTING:
        make_room()
    typer.echo(visible(str(text), keep="\n\t"), err=err, nl=nl)


def say_line(text: str, *, err: bool = False) -> None:
    """Print what another file says: a line however it was broken, and not a megabyte."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    say(indent + one_line(text, LONGEST_LINE), err=err)
