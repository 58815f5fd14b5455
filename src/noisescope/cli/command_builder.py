"""A typer command from an options class: its options are the fields, its help is the function's docstring.

Also what several commands share: warnings and interrupts in one line, stored commands, exit codes.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
import typer.core

from noisescope import api, progress
from noisescope.cli.output import say
from noisescope.cli.progress_display import ProgressDisplay
from noisescope.errors import InvalidInput, MissingExtra
from noisescope.options.base import CommandOptions
from noisescope.options.command_text import OF_THIS_CALL
from noisescope.options.device_commands import RecordOptions
from noisescope.options.experiment_and_run_commands import PhasesOptions
from noisescope.options.fields import Option, options_of
from noisescope.options.files import read_file
from noisescope.options.plans import MigrationOptions
from noisescope.options.sensitivity import DemoOptions
from noisescope.options.shared import (
    CheckingOptions,
    DeviceOptions,
    ExecutionOptions,
    LoadingOptions,
    ProgressOptions,
    ReportModelOptions,
    SamplingOptions,
)

E = TypeVar("E", bound=ExecutionOptions)
L = TypeVar("L", bound=LoadingOptions)
M = TypeVar("M", bound=ReportModelOptions)
COMMANDS: dict[str, tuple[type[CommandOptions], Callable[[Any], None]]] = {}  # all that were added, by name
_NUMBER = re.compile(r"\d*\.?\d+(e-?\d+)?", re.IGNORECASE)


def add_command(app: typer.Typer, run: Callable[[Any], None]) -> None:
    """`run` as a command of the app: called with its options (the class that its annotation names), checked."""
    options: type[CommandOptions] = get_type_hints(run)["options"]
    COMMANDS[options.command] = options, run
    known = options_of(options, "command")

    def call(**given: Any) -> None:
        typed = {name: word for name, word in given.items() if word is not None}
        words = {name: known[name].checked(word, text=True, where=known[name].typed) for name, word in typed.items()}
        file = {} if words.get("config") is None else read_file(words["config"], options)
        keys = {name: f"{name} (in {words['config']})" for name in file if name not in words}
        asked = options.from_command_line({**file, **words}, keys=keys)
        refuse_early(asked)
        carry_out(run, asked)

    parameters = [_parameter(one) for one in known.values()]
    call.__dict__["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__doc__ = run.__doc__

    class Command(typer.core.TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ours = rewritten(args, known)
            refuse_mistyped(ours, known, options.command)
            return super().parse_args(ctx, ours)

    app.command(options.command.split()[-1], cls=Command)(call)


def _parameter(option: Option) -> inspect.Parameter:
    """As typer reads it. Everything is text that may be absent: defaults and checks are those of the options class."""
    if option.argument:
        info: Any = typer.Argument(metavar=option.argument, help=option.help, show_default=False)
        hint: Any = Annotated[str | None, info]
    elif option.kind is bool:
        names = (f"{option.flag}/--{option.negative}",) if option.negative else option.flags
        hint = Annotated[bool | None, typer.Option(*names, help=_help(option), show_default=False)]
    else:
        names, hidden = option.flags, option.hidden
        info = typer.Option(*names, metavar=option.unit, help=_help(option), show_default=False, hidden=hidden)
        hint = Annotated[str | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _help(option: Option) -> str:
    return f"{option.sentence} [default: {option.shown_default}]" if option.shown_default else option.sentence


def rewritten(args: list[str], options: dict[str, Option]) -> list[str]:
    """A command line with other names as ours: --window_size 3 is --window 3, --model X is X, numbers get commas."""
    names = {f"--{alias.replace('_', '-')}": option for option in options.values() for alias in option.aliases}
    names |= {option.flag: option for option in options.values()}
    found: list[str] = []
    places: dict[str, str] = {}
    waiting = list(args)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*places.values(), *found, word, *waiting]
        flag, equals, value = word.partition("=")
        option = names.get(flag.replace("_", "-")) if flag.startswith("--") else None
        if option is None:
            found.append(word)
            continue
        if option.argument:
            if equals or waiting:
                places[option.argument] = value if equals else waiting.pop(0)
            continue
        found.append(f"{option.flag}{equals}{value}")
        if option.many and option.kind is not str and not equals and waiting:
            numbers = [waiting.pop(0)]
            while waiting and _NUMBER.fullmatch(waiting[0]):
                numbers.append(waiting.pop(0))
            found.append(",".join(numbers))
    return [*(places[one.argument] for one in options.values() if one.argument in places), *found]


def refuse_mistyped(args: list[str], options: dict[str, Option], command: str) -> None:
    """An unknown flag, with the nearest one, or a flag without its value, in one line."""
    see = f"See noisescope {command} --help"
    values = {name for o in options.values() if not o.argument and o.kind is not bool for name in o.flags}
    switches = {name for o in options.values() if o.kind is bool for name in o.flags}
    switches |= {f"--{o.negative}" for o in options.values() if o.negative} | {"--help"}
    waiting = list(args)
    while waiting and waiting[0] != "--":
        word = waiting.pop(0)
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and flag not in values | switches:
            shown = sorted({o.flag for o in options.values() if not o.argument and not o.hidden} | switches)
            near = difflib.get_close_matches(flag.replace("_", "-"), shown, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise InvalidInput(f"there is no option {flag}. {hint}{see}")
        if word in values and not equals:
            if not waiting or waiting[0].partition("=")[0] in values | switches:
                came = f"{waiting[0]} follows it" if waiting else "nothing follows it"
                raise InvalidInput(f"{word} needs a value, and {came}. {see}")
            waiting.pop(0)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings as one line without source code."""

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        say(f"warning: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def hush_torchao() -> None:
    """Leave out what is logged when transformers imports torchao, if that is installed: nobody here can act on it.

    It says which of its kernels are not for this machine, and torch that it registers enums in an old way.
    """
    for logger in ("torchao", "torch.utils._pytree"):
        logging.getLogger(logger).addFilter(_concerns_users)


def _concerns_users(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Failed to load " not in text and " is an Enum subclass " not in text


def carry_out(run: Callable[[Any], None], options: CommandOptions) -> None:
    """Run a command: warnings in one line, progress on stderr, and Ctrl-C ends in one line that says how to go on."""
    talks = isinstance(options, ProgressOptions) and not options.quiet
    shown = ProgressDisplay(verbose=getattr(options, "verbose", False)) if talks else None
    try:
        with plain_warnings(), shown or nullcontext(), progress.shown_by(shown):
            run(options)
    except KeyboardInterrupt:
        say(f"\ninterrupted. {_how_to_go_on(options)}", err=True)
        raise typer.Exit(130) from None


def _how_to_go_on(options: CommandOptions) -> str:
    if isinstance(options, RecordOptions):
        if api.comparison.is_unfinished(options.output):
            return f"{options.output} holds an unfinished record: remove it, and record again"
    elif isinstance(options, (ExecutionOptions, DemoOptions)):
        output = options.output
        if output is not None and (output / api.reports.FILE).exists():
            return f"What was measured is kept: noisescope runs resume {output}"
        if output is None:
            return "Nothing was kept: with -o DIR the same command can be resumed"
    return "Nothing was kept: run the same command again"


def refuse_early(options: CommandOptions) -> None:
    """Refuse what can be seen without torch: packages that are missing, a device that is not there, wrong columns."""
    needed: list[tuple[bool, str, str]] = [
        (isinstance(options, ExecutionOptions) and options.executor == "ray", "ray", "--executor ray"),
        (isinstance(options, PhasesOptions) and options.method == "grpo", "trl", "--method grpo"),
        (isinstance(options, DeviceOptions) and options.device_map is not None, "accelerate", "--device-map"),
    ]
    for wanted, package, what in needed:
        if wanted and importlib.util.find_spec(package) is None:
            raise MissingExtra(f"{what} needs the package {package}: pip install 'noisescope[{package}]'")
    device = getattr(options, "device", "cpu")
    if device.partition(":")[0] == "cuda" and not isinstance(options, MigrationOptions) and _lacks_cuda():
        raise InvalidInput(
            f"--device {device}: this build of torch has no CUDA. Leave --device out to run on the CPU, or install a "
            "build of torch with CUDA (https://pytorch.org/get-started/locally)"
        )
    output = getattr(options, "output", None)
    if isinstance(options, LoadingOptions) and isinstance(output, Path) and output.exists():
        model = Path(str(options.model)).expanduser()
        if model.exists() and output.samefile(model):
            raise InvalidInput(f"-o {output} is the model's own folder: give another folder for the results")
    for name in ("run", "report"):
        folder = getattr(options, name, None)
        if isinstance(folder, Path) and folder.is_dir():
            api.reports.check_finished(folder)
    if isinstance(options, SamplingOptions):
        api.reports.check_data(options)


def _lacks_cuda() -> bool:
    """Whether torch was built without CUDA and ROCm, by its version file: importing it takes seconds."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return False
    built = dict(re.findall(r"^(cuda|hip)\b[^=]*= (.+)$", text, re.MULTILINE))
    return bool(built) and all(value.strip() == "None" for value in built.values())


def resumable_options(options: E) -> E:
    """The options of a run that `runs resume` can repeat from any folder."""
    stored = {name: value for name, value in options.plain().items() if name not in (*OF_THIS_CALL, "output")}
    for key in ("model", "data", "calibration", "baseline", "held_out", "second_model", "second_data"):
        path = stored.get(key)
        if isinstance(path, str) and path != "demo" and Path(path).exists():
            stored[key] = str(Path(path).absolute())  # a hub id or a name stays what it is
    repeat = {"name": options.command, "options": stored, "again": list(options.not_stored())}
    return dataclasses.replace(options, repeat=repeat)


def load_model(options: L) -> tuple[Any, L]:
    """The model of a command, and the options with the device and dtype that were chosen, which a line announces."""
    return api.defaults.load_chosen(options, announcer(options))


def load_reported_model(report: api.reports.Report, options: M) -> tuple[Any, M]:
    """The model that a report is of, where the report names it: the report may be anybody's."""
    show_named_model(report, options)
    return api.defaults.load_report_chosen(report, options, announcer(options))


def announcer(options: CommandOptions) -> Callable[[str], None]:
    """Prints what was chosen on stderr, unless --quiet."""
    quiet = isinstance(options, ProgressOptions) and options.quiet
    return lambda line: None if quiet else say(line, err=True)


def show_named_model(report: api.reports.Report, options: ReportModelOptions) -> None:
    """The model that is about to be loaded where the report names it: the report may be anybody's."""
    source = report["run"]["model"]["source"]
    if options.model is None and source != "demo":
        say(f"model, as the report names it: {json.dumps(source)}", err=True)


def exit_by(verdict: api.reports.pass_fail.Verdict, options: CheckingOptions) -> NoReturn:
    """The exit code of a verdict: 0 pass, 1 fail, 3 undecided, which --allow-undecided makes 0."""
    raise typer.Exit(api.reports.pass_fail.exit_code(verdict, allow_undecided=options.allow_undecided))
