"""Python functions whose keywords are the fields of an options class."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from noisescope.errors import InvalidInput
from noisescope.options.fields import Option, options_of
from noisescope.options.values import CommandOptions, from_keywords, unlike_default
from noisescope.options.words import sentence

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
