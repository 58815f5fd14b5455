"""The command line: `noisescope COMMAND`. A file for each command or group; what is heavy is imported inside.

Exit codes: 0 fine, 1 a check says no, 2 wrong usage or bad input (one line on stderr), 3 undecided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core

from noisescope import __version__
from noisescope.cli.command_builder import add_command, hush_torchao
from noisescope.cli.diagnose import diagnose_model, robustness_of_model, run_demo
from noisescope.cli.experiment import experiment
from noisescope.cli.gate import gate_model
from noisescope.cli.inspect import inspect_model
from noisescope.cli.locate import locate_fault
from noisescope.cli.output import say
from noisescope.cli.passport import passport_of_device
from noisescope.cli.plan import plan
from noisescope.cli.records import compare_devices, record_device
from noisescope.cli.runs import draw_report, runs
from noisescope.errors import NoisescopeError
from noisescope.text_escaping import one_line

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, or of later versions of typer their own copy
LONGEST = 2000  # characters of an error
_HELP = "NoArgsIsHelpError"  # a usage error that is the help itself: nothing was typed


@contextmanager
def usage_in_one_line() -> Iterator[None]:
    """Unknown commands, extra arguments and the like: what came, and where help is."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == _HELP:
            raise
        wrong: Any = error
        path = "noisescope" if wrong.ctx is None else wrong.ctx.command_path
        message = one_line(wrong.format_message(), LONGEST)
        stop = "" if message.endswith((".", "?")) else "."
        say(f"error: {message}{stop} See {path} --help", err=True)
        raise typer.Exit(2) from error


class Commands(typer.core.TyperGroup):
    """Prints errors made for the user as one line; `--debug` shows where they came from.

    The contexts are Any: typer 0.15 takes click's, later versions their own copy of it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = sorted(args, key=lambda arg: arg != "--debug")  # stable: `noisescope inspect X --debug` works too
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with usage_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with usage_in_one_line():
                return super().invoke(ctx)
        except NoisescopeError as error:
            if ctx.params.get("debug"):
                raise
            say(f"error: {one_line(str(error), LONGEST)}", err=True)
            raise typer.Exit(error.exit_code) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: quick to show, easy to read in a log
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"noisescope {__version__}")
        raise typer.Exit


@app.callback()
def noisescope(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Controlled noise as an oscilloscope for large language models."""
    hush_torchao()


for _run in (
    run_demo, diagnose_model, robustness_of_model, inspect_model, locate_fault, passport_of_device, record_device,
    compare_devices, gate_model, draw_report,
):  # fmt: skip
    add_command(app, _run)
app.add_typer(experiment, name="experiment")
app.add_typer(plan, name="plan")
app.add_typer(runs, name="runs")


def main() -> None:
    app(prog_name="noisescope")
