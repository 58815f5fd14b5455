"""The option tables of docs/cli.md: `python -m noisescope.options.docs_tables docs/cli.md` writes them anew.

A table stands between `<!-- options: COMMAND -->` and `<!-- end of options -->`, a shared group's under its title.
`Common options` is the table of options that most commands have.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from noisescope.options import device_commands, experiment_and_run_commands, plans, sensitivity
from noisescope.options.base import CommandOptions
from noisescope.options.fields import Option, options_of
from noisescope.options.shared import DeviceOptions, ExecutionOptions, SamplingOptions, ScoringOptions

GROUPS: tuple[type[CommandOptions], ...] = (SamplingOptions, ScoringOptions, ExecutionOptions, DeviceOptions)
_CLASSES = [
    one
    for module in (sensitivity, device_commands, plans, experiment_and_run_commands)
    for one in vars(module).values()
]
COMMANDS: tuple[type[CommandOptions], ...] = tuple(
    dict.fromkeys(one for one in _CLASSES if isinstance(one, type) and issubclass(one, CommandOptions) and one.command)
)
COMMON = ("json", "config")
_PLACE = re.compile(r"(<!-- options: (.+?) -->\n)(.*?)(<!-- end of options -->)", re.DOTALL)


def table(cls: type[CommandOptions]) -> str:
    """What a command has of its own, and a line that names the shared groups that it has besides."""
    known = options_of(cls)
    groups = [group for group in GROUPS if cls is not group and issubclass(cls, group)]
    groups = [one for one in groups if not any(two is not one and issubclass(two, one) for two in groups)]
    shared = {
        name for group in groups for name, one in options_of(group).items() if _as_shown(known[name]) == _as_shown(one)
    }
    own = [one for name, one in known.items() if name not in (*shared, *COMMON) and one.shown]
    own.sort(key=lambda option: not option.argument)
    lines = ["| option | default | |", "|---|---|---|", *map(_row, own)] if own else []
    also = [f"[`{known[name].flag}`](#common-options)" for name in COMMON if name in known]
    also += [f"[{one.title.lower()}](#{one.title.lower().replace(' ', '-')})" for one in groups]
    if also:
        lines += ["", f"Also: {', '.join(also)}."] if lines else [f"Options: {', '.join(also)}."]
    return "\n".join(lines)


def common_table() -> str:
    """The options that most commands have, from the first command that has them all."""
    known = next(known for known in map(options_of, COMMANDS) if set(COMMON) <= set(known))
    return "\n".join(["| option | default | |", "|---|---|---|", *(_row(known[name]) for name in COMMON)])


def _as_shown(option: Option) -> tuple[object, ...]:
    return option.help, option.default, option.shown_default, option.negative


def _row(option: Option) -> str:
    value = f" {option.unit}" if option.unit and not option.argument else ""
    names = [option.argument or f"{option.flag}{value}", *([option.short] if option.short else ())]
    names += [f"--{option.negative}"] if option.negative else []
    default = "required" if option.required else option.shown_default
    return f"| {', '.join(f'`{name}`' for name in names)} | {_cell(default)} | {_cell(option.sentence)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rewritten(page: str) -> str:
    """A page with its tables as the options are."""
    tables = {one.command or one.title: table(one) for one in (*COMMANDS, *GROUPS)} | {"Common options": common_table()}
    return _PLACE.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[4]}", page)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
