"""The base of all options classes: checked when made, from keywords, from a stored command, to plain values."""

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
from noisescope.options.fields import Option, options_of, sentence

Naming = Callable[[str], str]  # an option's name -> how the user gave it: a keyword, a flag, a key of a file


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
        self.check(named)

    def check(self, named: Naming) -> None:
        """What must hold between options; errors say `named("max_mape")`."""

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
        return cls(**values, naming=lambda name: from_file.get(name) or known[name].typed)

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """From what `plain` gave; names of earlier versions are understood, options that are gone are left out."""
        names = canonical_names(options_of(cls).values())
        return cls(**{names[name]: value for name, value in stored.items() if name in names and value is not None})

    def plain(self) -> dict[str, Any]:
        """JSON values of all that a command line can give."""
        return {
            name: _plain(value)
            for name, value in vars(self).items()
            if options_of(type(self))[name].surface in ("both", "command")
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(member) for member in value]
    return str(value) if isinstance(value, Path) else value


def canonical_names(options: Iterable[Option]) -> dict[str, str]:
    """Every name that is understood -> ours."""
    return {name: option.name for option in options for name in (option.name, *option.aliases)}


def from_keywords(cls: type[CommandOptions], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a Python call under their own names; an unknown one is an error with the nearest."""
    allowed = [option for option in options_of(cls).values() if option.surface in ("both", "python")]
    names = canonical_names(allowed)
    found: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in names:
            raise unknown("keyword", name, [*(option.name for option in allowed), "options"])
        if names[name] in found:
            raise InvalidInput(f"{names[name]} is given twice, once as {name}: keep one of them")
        found[names[name]] = value
    return found


def unlike_default(value: CommandOptions) -> dict[str, Any]:
    """Those fields of an options value that were chosen."""
    fields = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: one for name, one in vars(value).items() if one != fields[name]}


# Python functions whose keywords are the fields of an options class.


R = TypeVar("R")


def asks(options: type[CommandOptions], *positional: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """For a function with a parameter `asked`: its place is taken by the options, `positional` ones first.

    `options=` gives several at once: a whole options value of this function, or those of execution (ns.Options).
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = _signature(function, options, positional)
        own = [name for name in inspect.signature(function).parameters if name != "asked"]

        @functools.wraps(function)
        def call(*given: Any, **keywords: Any) -> R:
            several = keywords.pop("options", None)
            apart = {name: keywords.pop(name) for name in own if name in keywords}
            chosen = from_keywords(options, keywords)
            whole = several if isinstance(several, options) else None
            bound = (signature.bind if whole is None else signature.bind_partial)(*given, **apart, **chosen).arguments
            apart = {name: bound.pop(name) for name in own if name in bound}
            if whole is None:
                base = {} if several is None else unlike_default(several)
                return function(**apart, asked=options(**{**base, **bound}))
            if bound:
                raise InvalidInput(f"{', '.join(bound)} beside options=, which holds all of them: keep one")
            return function(**apart, asked=whole)

        call.__dict__["__signature__"] = signature
        call.__doc__ = f"{inspect.getdoc(function)}\n\nOptions\n{_described(options)}"
        return call

    return decorate


def _signature(
    function: Callable[..., Any], options: type[CommandOptions], positional: tuple[str, ...]
) -> inspect.Signature:
    own = dict(inspect.signature(function, eval_str=False).parameters)
    asked = own.pop("asked")
    known = {n: o for n, o in options_of(options).items() if o.surface in ("both", "python") and n not in own}
    places = [_parameter(options, known[name], inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    named = [_parameter(options, o, asked.KEYWORD_ONLY) for n, o in known.items() if n not in positional]
    several = inspect.Parameter("options", asked.KEYWORD_ONLY, default=None, annotation="Options | None")
    before = [p for p in own.values() if p.kind is not asked.KEYWORD_ONLY]
    after = [p for p in own.values() if p.kind is asked.KEYWORD_ONLY]
    result = inspect.signature(function).return_annotation
    return inspect.Signature([*before, *places, *after, *named, several], return_annotation=result)


def _parameter(options: type[CommandOptions], option: Option, kind: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if option.required else option.default
    hint = next(vars(one)["__annotations__"][option.name] for one in options.__mro__
                if option.name in vars(one).get("__annotations__", {}))  # fmt: skip
    return inspect.Parameter(option.name, kind, default=default, annotation=hint)


def _described(options: type[CommandOptions]) -> str:
    rows = [o for o in options_of(options).values() if o.surface in ("both", "python")]
    return "\n".join(
        textwrap.fill(
            f"{o.name}: {sentence(o)} {o.python}".strip(), 110, initial_indent="    ", subsequent_indent="        "
        )
        for o in rows
    )
