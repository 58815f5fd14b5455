"""An option in words, for help, docstrings and tables."""

from __future__ import annotations

from noisescope.options.fields import Option


def sentence(option: Option) -> str:
    """The help of an option with its choices."""
    allowed = f" One of {', '.join(option.choices)}." if option.choices and not option.many else ""
    allowed = f" Any of {', '.join(option.choices)}." if option.choices and option.many else allowed
    return f"{option.help}{allowed}"


def shown_default(option: Option) -> str:
    """The default of a command in words; "" where there is none to speak of."""
    value = option.default if option.command_default is None else option.command_default
    if option.default_text or value is None or (isinstance(value, bool) and not option.negative):
        return option.default_text
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(f"{member:g}" if isinstance(member, float) else str(member) for member in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
