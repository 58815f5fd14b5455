"""The option tables of docs/cli.md are those of the options."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.options.docs_tables import COMMANDS, GROUPS, rewritten
from noisescope.options.fields import options_of

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def test_the_tables_are_up_to_date() -> None:
    """Write them anew with `python -m noisescope.options.docs_tables docs/cli.md`."""
    assert rewritten(PAGE) == PAGE


def test_every_command_and_group_has_its_table() -> None:
    """A new command is a new section; all of its options stand in its table or in that of a group."""
    for cls in (*COMMANDS, *GROUPS):
        name = cls.command or cls.title
        assert f"<!-- options: {name} -->" in PAGE, name


def test_help_shows_every_option() -> None:
    """And the commands are those that have options."""
    for cls in COMMANDS:
        said = " ".join(CliRunner().invoke(app, [*cls.command.split(), "--help"]).output.split())
        for option in options_of(cls).values():
            if option.hidden:
                assert option.flag not in said
            elif option.surface in ("both", "command"):
                assert (option.argument or option.flag) in said, (cls.command, option.name)
                assert option.help.split(". ")[0] in said, (cls.command, option.name)
