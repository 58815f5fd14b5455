"""The base of all options classes: checked when made, from keywords, from a stored command, to plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from noisescope.errors import InvalidInput, unknown
from noisescope.options.fields import Option, options_of

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
