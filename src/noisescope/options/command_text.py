"""An options value as the command that gives it: what a report says of how it was made, and of what to run next.

A value is kept as plain JSON, for a report is read where its files are not; `command_line` writes it out. Parsing that
gives the same options again, whatever option a command gets: tests/options/test_command_text.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisescope.options.base import CHOSEN, CommandOptions, unlike_default
from noisescope.options.fields import Option, options_of
from noisescope.options.shared import DataFile

# Of one call: what it prints and where its options came from. What is never stored is left out, too: nobody should
# paste --trust-remote-code out of a report.
OF_THIS_CALL = ("config", "json", "quiet", "verbose", "dry_run")


def command_values(options: CommandOptions) -> dict[str, Any] | None:
    """What was chosen, by name, with whatever else a command line would choose by itself.

    None where no command line can give it: tokenised batches, a function as metric, seeds of one's own.
    """
    known = options_of(type(options))
    chosen = unlike_default(options) | {name: vars(options)[name] for name in CHOSEN if name in known}
    found: dict[str, Any] = {}
    for name, value in chosen.items():
        option = known[name]
        if option.surface == "none" or name == "progress" or name in OF_THIS_CALL or not option.stored:
            continue
        if name == "data" and isinstance(value, DataFile):
            found |= {"data": str(value.path), "prompt_field": value.prompt_field}
            found |= {} if value.answer_field is None else {"answer_field": value.answer_field}
            continue
        if isinstance(value, tuple) and not option.many and value == tuple(range(len(value))):
            value = len(value)  # seeds from 0 on
        plain = _plain(value, option)
        if plain is None and value is not None:
            return None
        found[name] = plain
    return found


def _plain(value: Any, option: Option) -> Any:
    """None for what has no place on a command line."""
    if option.surface == "python":
        return None
    if isinstance(value, tuple) and option.many:
        return list(value)
    return str(value) if isinstance(value, Path) else value if isinstance(value, (str, bool, int, float)) else None


def command_line(cls: type[CommandOptions], values: Mapping[str, Any]) -> str:
    """The command that gives these options, for a shell. Options that the command has not are left out."""
    words = ["noisescope", *cls.command.split()]
    known = options_of(cls, "command")
    words += [str(values[name]) for name, option in known.items() if option.argument and values.get(name) is not None]
    for name, option in known.items():
        value = values.get(name)
        if value is None or option.argument:
            continue
        if option.kind is bool:
            off = [f"--{option.negative}"] if option.negative else []
            words += [option.flag] if value else off
        else:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [option.short or option.flag, text]
    return shlex.join(words)
