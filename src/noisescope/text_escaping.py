r"""Makes text from anywhere safe to show: one sanitiser for Markdown, HTML, PDF, the terminal, JUnit and CSV.

A character that a screen hides or obeys (a control character, one that turns the direction of writing, one without
width, half of a surrogate pair) is written as its escape, \x1b or \u202e, so that what is read is what is there.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence

SHORT = 60  # characters of a wrong value that an error shows
LONG = 240  # characters of the reason in an error
_MARKUP = re.compile(
    r"[\\*~$|]"  # escapes, emphasis, struck out, formulas, cells
    r"|(?<!\w)_|_(?!\w)"  # emphasis; inside a name an underscore is only itself
    r"|\](?=[(\[:])|\[(?=\^)"  # links, their definitions, footnotes; an interval [1, 2] is none
    r"|(?<=http):(?=//)|(?<=https):(?=//)|(?<=www)\.",  # bare addresses, which GitHub makes links of
    re.IGNORECASE,
)
_CODE = re.compile(r"((?<!`)`[\w ./,=:@+{}-]+`(?!`))")  # nothing in it is markup, however its backticks are paired
_LINE_START = re.compile(r"^(?:[#>]|[-+=](?=[-+=\s]|$)|\d+(?=[.)](?:\s|$)))")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a cell that starts so


def visible(text: str, *, keep: str = "") -> str:
    """The text with an escape for each character that is not printed as itself, but for those of `keep`.

    >>> visible("a\\x1b[31m\\u202eb")
    'a\\\\x1b[31m\\\\u202eb'
    """
    if text.isprintable():
        return text
    return "".join(sign if sign in keep or _is_plain(sign) else _escape(sign) for sign in text)


def _is_plain(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode()


def one_line(text: str, most: int | None = None) -> str:
    """Without line breaks and hidden characters; the middle is cut out if it is longer than `most`."""
    line = visible(" ".join(text.split()))
    if most is None or len(line) <= most:
        return line
    return f"{line[: most // 2]} ... {line[-most // 3 :]}"


def cut(text: str, most: int = SHORT) -> str:
    """The start of a text, in at most so many characters."""
    line = one_line(text[: 4 * most])
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 3]}..."


def shown(value: object) -> str:
    """A wrong value as shown in an error: as JSON, at most 60 characters, whatever its size."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return cut(repr(value) if isinstance(value, float) else json.dumps(_start(value), ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def _start(value: object, depth: int = 4) -> object:
    """As much of a value as can be shown."""
    if isinstance(value, str):
        return value[: 4 * SHORT]
    if isinstance(value, Mapping):
        return {str(k)[:SHORT]: _start(value[k], depth - 1) for k in list(value)[:SHORT]} if depth else "..."
    if isinstance(value, (list, tuple)):
        return [_start(member, depth - 1) for member in value[:SHORT]] if depth else "..."
    return value


def markdown(text: str, *, starts_line: bool = False) -> str:
    """Text that can't break a table or become markup; code in backticks stays, where nothing in it could be markup."""
    parts = _CODE.split(one_line(text))
    line = "".join(part if at % 2 else _escaped(part) for at, part in enumerate(parts))
    if starts_line and (found := _LINE_START.match(line)):
        end = found.end() if line[0].isdigit() else 0
        line = f"{line[:end]}\\{line[end:]}"
    return line


def _escaped(text: str) -> str:
    plain = re.sub(r"&(?=#?\w+;)", "&amp;", text).replace("<", "&lt;")
    return _MARKUP.sub(lambda found: f"\\{found[0]}", plain).replace("`", "\\`")


def html_text(text: str, most: int | None = None) -> str:
    """One line for HTML, as text or between quotes: nothing in it is markup.

    >>> html_text("a <b>\\x1b & 'c'")
    'a &lt;b&gt;\\\\x1b &amp; &#x27;c&#x27;'
    """
    return html.escape(one_line(text, most))


def csv_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    >>> csv_cell("=1+1"), csv_cell("-0.5")
    ("'=1+1", '-0.5')
    """
    cell = visible(text, keep="\n")
    return f"'{cell}" if text.startswith(_FORMULA) and not _is_number(text) else cell


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text) is not None


def last_part(path: str) -> str:
    """A path as a report may show it: an absolute path is reduced to its last part.

    >>> last_part("/home/me/models/llama"), last_part("models/llama")
    ('llama', 'models/llama')
    """
    absolute = path.startswith(("/", "~", "\\\\")) or re.match(r"[A-Za-z]:[\\/]", path)
    return visible((re.split(r"[\\/]", path.rstrip("/\\"))[-1] or path) if absolute else path)


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """A table, its columns as wide as they need to be: a module's name is there to be copied, so it is never cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)
