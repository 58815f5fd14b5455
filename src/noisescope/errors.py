"""Every error noisescope raises on purpose. A message names the wrong value, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from noisescope.text_escaping import cut


class NoisescopeError(Exception):
    """The base class: `except NoisescopeError` catches everything that noisescope raises on purpose."""

    exit_code = 2


class InvalidInput(NoisescopeError, ValueError):
    """An argument, a file or a name that can't be used."""


class UnsupportedModel(NoisescopeError):
    """A model whose arithmetic can't be reached from here (no blocks, a serving engine, a packed weight)."""


class ModelHeld(NoisescopeError):
    """A scope on this model belongs to another thread or coroutine, or can't be opened or closed now."""


class MissingExtra(NoisescopeError):
    """An optional package is needed."""


class NothingInjected(NoisescopeError):
    """A scope ended without altering its targets: never report that as "robust"."""


class NoiseRoundsAway(NothingInjected):
    """The noise is smaller than half the spacing of the numbers it was added to, so rounding removed it."""


def unknown(what: str, given: object, allowed: Iterable[object]) -> InvalidInput:
    """The error for a name outside a list, with the nearest allowed name."""
    names = [str(name) for name in allowed]
    near = difflib.get_close_matches(str(given)[:100], names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InvalidInput(f"unknown {what} {cut(repr(given))}. Allowed: {', '.join(names)}.{hint}")


def whole_number(value: object, what: str, *, least: int = 1) -> int:
    """The value; an error unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{what} must be an integer of at least {least}, got {cut(repr(value))}")
    return value
