"""The base of all options classes, and functions whose keywords are the fields of one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from noisescope.errors import InvalidInput, unknown
from noisescope.options.fields import Option, options_of

Naming = Callable[[str], str]  # an option's name -> how the user gave it: a keyword, a flag, a key of a file


CHOSEN = ("device", "dtype", "effort", "samples")  # where a command line leaves them open, sensible ones are chosen
WIDEN_TRUST = ("trust_remote_code", "address")  # only what is typed counts: no file of a run, no config file


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of one command or of a group that commands share. Errors name options by `naming`, else as keywords."""

    command: ClassVar[str] = ""  # as typed: "plan precision"
    title: ClassVar[str] = ""  # of a shared group, in the documentation
    naming: InitVar[Naming | None] = None

    def __post_init__(self, naming: Naming | None) -> None:
        named = naming or str
        for name, option in options_of(type(self)).items():
            object.__setattr__(self, name, option.checked(vars(self)[name], where=named(name)))
        for problem in self.problems(named):
            raise InvalidInput(problem)

    def problems(self, named: Naming) -> Iterable[str]:
        """What is wrong between options; messages name them as `named("max_mape")`."""
        return ()

    @classmethod
    def from_command_line(cls, given: Mapping[str, Any], *, keys: Mapping[str, str] | None = None) -> Self:
        """From words of a command line (None: not given) and values that a file gave, under its `keys`."""
        values = {name: value for name, value in given.items() if value is not None}
        known, from_file = options_of(cls), keys or {}
        stops = any(known[name].stops and value for name, value in values.items())
        for name, option in known.items():
            if option.required and name not in values and not stops:
                raise InvalidInput(f"{option.typed} is missing: {option.help} See noisescope {cls.command} --help")
            if option.command_default is not None and name not in values:
                values[name] = option.command_default
        if "left_open" in known:
            values["left_open"] = tuple(name for name in CHOSEN if name in known and given.get(name) is None)
        return cls(**values, naming=lambda name: from_file.get(name) or known[name].typed)

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any], **given: Any) -> Self:
        """From what `plain` gave; names of earlier versions are understood, options that are gone are left out.

        So is what no run stores: it was put there by somebody else.
        """
        names = canonical_names(option for option in options_of(cls, "command").values() if option.stored)
        found = {names[name]: value for name, value in stored.items() if name in names and value is not None}
        return cls(**{**found, **given})

    def pick(self, *names: str) -> dict[str, Any]:
        """These options as keywords for a call."""
        return {name: vars(self)[name] for name in names}

    def plain(self) -> dict[str, Any]:
        """JSON values of all that a command line can give and a run may store."""
        known = options_of(type(self), "command")
        return {name: _plain(value) for name, value in vars(self).items() if name in known and known[name].stored}

    def not_stored(self) -> tuple[str, ...]:
        """Names of the options that were given and that `plain` leaves out."""
        known = options_of(type(self), "command")
        return tuple(name for name in unlike_default(self) if name in known and not known[name].stored)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(member) for member in value]
    return str(value) if isinstance(value, Path) else value


def canonical_names(options: Iterable[Option]) -> dict[str, str]:
    """Every name that is understood -> ours."""
    return {name: option.name for option in options for name in (option.name, *option.aliases)}


def from_keywords(cls: type[CommandOptions], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a Python call under their own names; an unknown one is an error with the nearest."""
    allowed = options_of(cls, "python")
    names = canonical_names(allowed.values())
    found: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in names:
            typed = options_of(cls, "command").get(canonical_names(options_of(cls, "command").values()).get(name, ""))
            if typed is not None and typed.python:
                raise InvalidInput(f"{name} is an option of the command line. {typed.python}")
            raise unknown("keyword", name, [*allowed, "options"])
        if names[name] in found:
            raise InvalidInput(f"{names[name]} is given twice, once as {name}: keep one of them")
        found[names[name]] = value
    return found


def unlike_default(value: CommandOptions) -> dict[str, Any]:
    """Those fields of an options value that were chosen."""
    fields = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: one for name, one in vars(value).items() if one != fields[name]}


R = TypeVar("R")


def takes_options(cls: type[CommandOptions], *positional: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """For a function with a parameter `options`: callers give its fields as keywords, `positional` ones first.

    `options=` still gives several at once: a whole options value of this function, or those of execution (ns.Options).
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = _signature(function, cls, positional)
        own = [name for name in inspect.signature(function).parameters if name != "options"]

        @functools.wraps(function)
        def call(*given: Any, **keywords: Any) -> R:
            several = keywords.pop("options", None)
            apart = {name: keywords.pop(name) for name in own if name in keywords}
            chosen = from_keywords(cls, keywords)
            whole = several if isinstance(several, cls) else None
            bound = (signature.bind if whole is None else signature.bind_partial)(*given, **apart, **chosen).arguments
            apart = {name: bound.pop(name) for name in own if name in bound}
            if whole is None:
                base = {} if several is None else unlike_default(several)
                return function(**apart, options=cls(**{**base, **bound}))
            if bound:
                raise InvalidInput(f"{', '.join(bound)} beside options=, which holds all of them: keep one")
            return function(**apart, options=whole)

        call.__dict__["__signature__"] = signature
        call.__doc__ = f"{inspect.getdoc(function)}\n\nOptions\n{_described(cls)}"
        return call

    return decorate


def _signature(
    function: Callable[..., Any], cls: type[CommandOptions], positional: tuple[str, ...]
) -> inspect.Signature:
    own = dict(inspect.signature(function).parameters)
    keyword_only = own.pop("options").KEYWORD_ONLY
    known = {name: option for name, option in options_of(cls, "python").items() if name not in own}
    places = [_parameter(cls, known[name], inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    named = [_parameter(cls, option, keyword_only) for name, option in known.items() if name not in positional]
    several = inspect.Parameter("options", keyword_only, default=None, annotation="Options | None")
    before = [p for p in own.values() if p.kind is not keyword_only]
    after = [p for p in own.values() if p.kind is keyword_only]
    result = inspect.signature(function).return_annotation
    return inspect.Signature([*before, *places, *after, *named, several], return_annotation=result)


def _parameter(cls: type[CommandOptions], option: Option, kind: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if option.required else option.default
    hints = (vars(base).get("__annotations__", {}) for base in cls.__mro__)
    hint = next(own[option.name] for own in hints if option.name in own)
    return inspect.Parameter(option.name, kind, default=default, annotation=hint)


def _described(cls: type[CommandOptions]) -> str:
    shown = options_of(cls, "python").values()
    lines = (f"{option.name}: {option.sentence} {option.python}".strip() for option in shown)
    return "\n".join(textwrap.fill(line, 110, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines)
